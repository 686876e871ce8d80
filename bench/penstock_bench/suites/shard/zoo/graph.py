"""Message passing over the edges of a graph (Battaglia et al. 2018, arXiv:1806.01261), which predicts each node's class."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from penstock_bench.suites.shard.zoo.model import Model, PyTree
from penstock_bench.suites.shard.zoo.training import SEED, adamw, cross_entropy, init_state, normal, train_step

_NODES, _EDGES = 4096, 16384
_NODE_FEATURES, _EDGE_FEATURES = 64, 16
_WIDTH, _LAYERS, _CLASSES = 128, 3, 8


def graph() -> Model:
    optimizer = adamw()
    return Model("graph", "JAX", lambda: init_state(_init(), optimizer), _batch, train_step(_loss, optimizer))


def _init() -> PyTree:
    encoder, decoder, *layers = jax.random.split(jax.random.key(SEED), 2 + _LAYERS)
    return {
        "encoder": _init_linear(encoder, _NODE_FEATURES, _WIDTH),
        "layers": [_init_layer(*jax.random.split(layer, 4)) for layer in layers],
        "decoder": _init_linear(decoder, _WIDTH, _CLASSES),
    }


def _init_layer(*keys: Array) -> PyTree:
    return {
        "edge_in": _init_linear(keys[0], 2 * _WIDTH + _EDGE_FEATURES, _WIDTH),
        "edge_out": _init_linear(keys[1], _WIDTH, _WIDTH),
        "node_in": _init_linear(keys[2], 2 * _WIDTH, _WIDTH),
        "node_out": _init_linear(keys[3], _WIDTH, _WIDTH),
    }


def _init_linear(key: Array, fan_in: int, fan_out: int) -> PyTree:
    return {"w": normal(key, fan_in, fan_out), "b": jnp.zeros(fan_out)}


def _loss(params: PyTree, batch: PyTree) -> Array:
    nodes = jax.nn.relu(_linear(params["encoder"], batch["nodes"]))
    for layer in params["layers"]:
        nodes = nodes + _update(layer, nodes, batch)
    return cross_entropy(_linear(params["decoder"], nodes), batch["labels"])


def _update(layer: PyTree, nodes: Array, batch: PyTree) -> Array:
    """Return the change of each node by the messages of its edges: [N, D] → [N, D]."""
    senders, receivers = batch["senders"], batch["receivers"]
    ends = jnp.concatenate([nodes[senders], nodes[receivers], batch["edges"]], axis=-1)
    messages = _linear(layer["edge_out"], jax.nn.relu(_linear(layer["edge_in"], ends)))
    received = jax.ops.segment_sum(messages, receivers, num_segments=len(nodes))
    degree = jax.ops.segment_sum(jnp.ones(len(receivers)), receivers, num_segments=len(nodes))
    mean = received / jnp.maximum(degree, 1)[:, None]
    return _linear(layer["node_out"], jax.nn.relu(_linear(layer["node_in"], jnp.concatenate([nodes, mean], axis=-1))))


def _linear(params: PyTree, x: Array) -> Array:
    return x @ params["w"] + params["b"]


def _batch(seed: int) -> PyTree:
    rng = np.random.default_rng(seed)
    nodes = rng.standard_normal((_NODES, _NODE_FEATURES), np.float32)
    senders, receivers = rng.integers(_NODES, size=(2, _EDGES), dtype=np.int32)
    return {
        "nodes": nodes,
        "edges": rng.standard_normal((_EDGES, _EDGE_FEATURES), np.float32),
        "senders": senders,
        "receivers": receivers,
        "labels": nodes[:, :_CLASSES].argmax(axis=1).astype(np.int32),
    }
