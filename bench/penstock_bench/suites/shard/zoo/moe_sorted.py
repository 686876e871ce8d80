"""A mixture of experts whose tokens are sorted by expert, so that none is dropped.

The method is MegaBlocks (Gale et al. 2022, arXiv:2211.15841). The rest of the model is a Llama, as in Mixtral (Jiang et
al. 2024, arXiv:2401.04088).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from penstock_bench.suites.shard.zoo import llama
from penstock_bench.suites.shard.zoo.model import Layout, Model, PyTree
from penstock_bench.suites.shard.zoo.training import SEED, adamw, cross_entropy, init_state, normal, train_step

_SIZE = llama.Size(width=256, hidden=512)
_EXPERTS, _CHOSEN = 8, 2
_BALANCE = 0.01  # weight of the loss that keeps experts evenly used

# Each device has a part of every expert. With whole experts on each, tokens would have to be exchanged explicitly.
_LAYOUT: Layout = (
    ("experts/(gate|up)$", (None, None, "model")),
    ("experts/down$", (None, "model", None)),
    ("wq$", (None, "model")),
    ("wo$", ("model", None)),
    *llama.EMBEDDING_LAYOUT,
)


def moe_sorted() -> Model:
    optimizer = adamw()
    step = train_step(_loss, optimizer)
    return Model("moe-sorted", "JAX", lambda: init_state(_init(), optimizer), partial(llama.batch, size=_SIZE), step, _LAYOUT)


def _init() -> PyTree:
    embedding, head, *layers = jax.random.split(jax.random.key(SEED), 2 + _SIZE.layers)
    return {
        "embedding": jax.random.normal(embedding, (_SIZE.vocabulary, _SIZE.width)) * 0.02,
        "layers": [llama.init_attention(layer, _SIZE) | _init_experts(layer) for layer in layers],
        "norm": jnp.ones(_SIZE.width),
        "head": normal(head, _SIZE.width, _SIZE.vocabulary),
    }


def _init_experts(key: Array) -> PyTree:
    router, gate, up, down = jax.random.split(jax.random.fold_in(key, 1), 4)
    wide, narrow = (_EXPERTS, _SIZE.width, _SIZE.hidden), (_EXPERTS, _SIZE.hidden, _SIZE.width)
    return {
        "mlp_norm": jnp.ones(_SIZE.width),
        "router": normal(router, _SIZE.width, _EXPERTS),
        "experts": {
            "gate": jax.random.normal(gate, wide) * _SIZE.width**-0.5,
            "up": jax.random.normal(up, wide) * _SIZE.width**-0.5,
            "down": jax.random.normal(down, narrow) * _SIZE.hidden**-0.5,
        },
    }


def _loss(params: PyTree, batch: PyTree) -> Array:
    x = params["embedding"][batch["tokens"]]
    unevenness = jnp.zeros(())
    for layer in params["layers"]:
        x = x + llama.attention(layer, llama.rms_norm(x, layer["attention_norm"]), _SIZE)
        tokens = llama.rms_norm(x, layer["mlp_norm"]).reshape(-1, _SIZE.width)
        mixed, more = _experts(layer, tokens)
        x, unevenness = x + mixed.reshape(x.shape), unevenness + more
    return cross_entropy(llama.logits(params, x), batch["targets"]) + _BALANCE * unevenness / _SIZE.layers


def _experts(layer: PyTree, tokens: Array) -> tuple[Array, Array]:
    """Send tokens to their experts and back: [N, D] → the same, and how unevenly the experts are used []."""
    probabilities = jax.nn.softmax(tokens @ layer["router"])
    weights, experts = jax.lax.top_k(probabilities, _CHOSEN)
    weights /= jnp.sum(weights, axis=-1, keepdims=True)
    # Row 2 i + j is token i on its way to the expert of its choice j.
    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.bincount(experts.reshape(-1), length=_EXPERTS)
    done = _swiglu(layer["experts"], tokens[order // _CHOSEN], sizes) * weights.reshape(-1)[order, None]
    share = sizes / len(order)
    return jnp.zeros_like(tokens).at[order // _CHOSEN].add(done), _EXPERTS * jnp.sum(share * probabilities.mean(axis=0))


def _swiglu(experts: PyTree, rows: Array, sizes: Array) -> Array:
    """Apply each expert to its rows: [2 N, D], the first `sizes[0]` of which are for expert 0, and so on → the same."""
    gate = jax.lax.ragged_dot(rows, experts["gate"], sizes)
    up = jax.lax.ragged_dot(rows, experts["up"], sizes)
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, experts["down"], sizes)
