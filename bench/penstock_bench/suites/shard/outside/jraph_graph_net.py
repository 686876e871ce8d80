"""A graph network (Battaglia et al. 2018, arXiv:1806.01261) of jraph, as Flax's example of the molecules of ogbg-molpcba has it.

Its sizes are the example's: width 256, two layers in each update, five steps of message passing, 128 tasks.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax
from flax import linen as nn
from jax import Array

from penstock_bench.suites.shard.zoo.model import Model, PyTree
from penstock_bench.suites.shard.zoo.training import SEED, init_state, train_step

_GRAPHS, _NODES, _EDGES = 64, 2048, 4096  # with their padding, which is a graph too
_NODE_FEATURES, _EDGE_FEATURES, _TASKS = 9, 3, 128
_WIDTH, _STEPS = 256, 5


class _MLP(nn.Module):
    """[N, ...] → [N, D]."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for _ in range(2):
            x = nn.relu(nn.Dense(_WIDTH)(x))
        return nn.LayerNorm()(x)


class _GraphNet(nn.Module):
    """Graphs → logits [G, tasks]."""

    @nn.compact
    def __call__(self, graphs: jraph.GraphsTuple) -> Array:
        embedder = jraph.GraphMapFeatures(nn.Dense(_WIDTH), nn.Dense(_WIDTH), nn.Dense(_WIDTH))
        graphs = embedder(graphs._replace(globals=jnp.zeros((len(graphs.n_node), 1))))
        for _ in range(_STEPS):
            network = jraph.GraphNetwork(update_edge_fn=_update(), update_node_fn=_update(), update_global_fn=_update())
            updated = network(graphs)
            graphs = updated._replace(
                nodes=graphs.nodes + updated.nodes, edges=graphs.edges + updated.edges, globals=graphs.globals + updated.globals
            )
        return nn.Dense(_TASKS)(graphs.globals)


def _update() -> Callable:
    """Return an update function that concatenates its arguments."""
    mlp = _MLP()

    def update(x: Array) -> Array:
        return mlp(x)

    return jraph.concatenated_args(update)


def graph_net() -> Model:
    module, optimizer = _GraphNet(), optax.adam(1e-3)

    def init() -> PyTree:
        graphs = jax.tree.map(jnp.asarray, _batch(SEED)["graphs"])
        return init_state(module.init(jax.random.key(SEED), graphs), optimizer)

    def loss(params: PyTree, batch: PyTree) -> Array:
        logits = module.apply(params, batch["graphs"])
        losses = optax.sigmoid_binary_cross_entropy(logits, batch["labels"]).mean(axis=-1)
        real = jraph.get_graph_padding_mask(batch["graphs"])
        return jnp.where(real, losses, 0).sum() / real.sum()

    return Model("jraph-graph-net", "Linen", init, _batch, train_step(loss, optimizer))


def _batch(seed: int) -> PyTree:
    rng = np.random.default_rng(seed)
    graphs = jraph.batch_np([_molecule(rng) for _ in range(_GRAPHS - 1)])
    padded = jraph.pad_with_graphs(graphs._replace(globals=None), n_node=_NODES, n_edge=_EDGES, n_graph=_GRAPHS)
    return {
        "graphs": jax.tree.map(_narrow, padded),
        "labels": (rng.random((_GRAPHS, _TASKS)) < 0.1).astype(np.float32),
    }


def _narrow(leaf: np.ndarray) -> np.ndarray:
    """Return a leaf in 32 bits: the padding of some has 64."""
    return np.asarray(leaf, np.int32 if np.issubdtype(leaf.dtype, np.integer) else np.float32)


def _molecule(rng: np.random.Generator) -> jraph.GraphsTuple:
    """Return a tree of atoms with one ring closed, each bond in both directions."""
    atoms = int(rng.integers(16, 32))
    ends = np.array([[rng.integers(atom), atom] for atom in range(1, atoms)] + [[0, atoms - 1]], np.int32)
    senders, receivers = np.concatenate([ends, ends[:, ::-1]]).T
    return jraph.GraphsTuple(
        nodes=rng.standard_normal((atoms, _NODE_FEATURES), np.float32),
        edges=rng.standard_normal((len(senders), _EDGE_FEATURES), np.float32),
        senders=senders,
        receivers=receivers,
        globals=None,
        n_node=np.array([atoms], np.int32),
        n_edge=np.array([len(senders)], np.int32),
    )
