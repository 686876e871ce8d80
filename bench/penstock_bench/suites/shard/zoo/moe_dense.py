"""A mixture of experts with a fixed capacity, to which products with one-hot matrices dispatch the tokens.

The method is GShard (Lepikhin et al. 2020, arXiv:2006.16668).
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from penstock_bench.suites.shard.zoo.model import Layout, Model, PyTree
from penstock_bench.suites.shard.zoo.training import adamw, cross_entropy, text
from penstock_bench.suites.shard.zoo.training_nnx import init_and_step

_WIDTH, _LAYERS, _HEADS, _HIDDEN, _VOCABULARY = 256, 2, 8, 1024, 4096
_EXPERTS, _CHOSEN, _CAPACITY_FACTOR = 8, 2, 1.25
_BATCH, _LENGTH = 16, 128
_BALANCE = 0.01  # weight of the loss that keeps experts evenly used

# Experts are split over the devices that otherwise split a layer.
_LAYOUT: Layout = (
    ("experts/(widen|narrow)/value$", ("model", None, None)),
    ("(query|key|value)/kernel/value$", (None, "model", None)),
    ("(query|key|value)/bias/value$", ("model", None)),
    ("out/kernel/value$", ("model", None, None)),
    ("embedding/embedding/value$", ("model", None)),
    ("head/kernel/value$", (None, "model")),
)


class _MoE(nnx.Module):
    """Tokens [B, T] → logits [B, T, V] and how unevenly the experts are used []."""

    def __init__(self, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(_VOCABULARY, _WIDTH, embedding_init=nnx.initializers.normal(0.02), rngs=rngs)
        self.positions = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (_LENGTH, _WIDTH)))
        self.blocks = nnx.List([_Block(rngs) for _ in range(_LAYERS)])
        self.norm = nnx.RMSNorm(_WIDTH, rngs=rngs)
        self.head = nnx.Linear(_WIDTH, _VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: Array) -> tuple[Array, Array]:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        unevenness = jnp.zeros(())
        for block in self.blocks:
            x, more = block(x)
            unevenness += more
        return self.head(self.norm(x)), unevenness / _LAYERS


class _Block(nnx.Module):
    """[B, T, D] → the same, and how unevenly its experts are used []."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm1 = nnx.RMSNorm(_WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(_HEADS, _WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(_WIDTH, rngs=rngs)
        self.experts = _Experts(rngs)

    def __call__(self, x: Array) -> tuple[Array, Array]:
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        expert, unevenness = self.experts(self.norm2(x))
        return x + expert, unevenness


class _Experts(nnx.Module):
    """[B, T, D] → the same, and how unevenly experts are used [].

    Each sequence has its own capacity: C tokens in each of E experts.
    """

    def __init__(self, rngs: nnx.Rngs):
        initializer = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = nnx.Linear(_WIDTH, _EXPERTS, use_bias=False, rngs=rngs)
        self.widen = nnx.Param(initializer(rngs.params(), (_EXPERTS, _WIDTH, _HIDDEN)))
        self.narrow = nnx.Param(initializer(rngs.params(), (_EXPERTS, _HIDDEN, _WIDTH)))

    def __call__(self, x: Array) -> tuple[Array, Array]:
        probabilities = jax.nn.softmax(self.router(x))
        combine, first_choice = _places(probabilities)
        dispatch = (combine > 0).astype(x.dtype)
        sent = jnp.einsum("btec,btd->becd", dispatch, x)
        hidden = nnx.gelu(jnp.einsum("becd,edf->becf", sent, self.widen[...]))
        done = jnp.einsum("becf,efd->becd", hidden, self.narrow[...])
        unevenness = _EXPERTS * jnp.mean(jnp.sum(probabilities.mean(axis=1) * first_choice.mean(axis=1), axis=-1))
        return jnp.einsum("btec,becd->btd", combine, done), unevenness


def _places(probabilities: Array) -> tuple[Array, Array]:
    """Return the combine weights of each token, [B, T, E] → [B, T, E, C], and its first choice, [B, T, E] of 0 and 1.

    A token whose expert is at its capacity is dropped.
    """
    batch, length, _ = probabilities.shape
    capacity = math.ceil(_CHOSEN * length / _EXPERTS * _CAPACITY_FACTOR)
    weights, experts = jax.lax.top_k(probabilities, _CHOSEN)
    weights /= jnp.sum(weights, axis=-1, keepdims=True)
    chosen = jax.nn.one_hot(experts, _EXPERTS)  # [B, T, 2, E]
    # First choices take capacity before second ones.
    in_turn = chosen.swapaxes(1, 2).reshape(batch, _CHOSEN * length, _EXPERTS)
    ahead = (jnp.cumsum(in_turn, axis=1) - in_turn).reshape(batch, _CHOSEN, length, _EXPERTS).swapaxes(1, 2)
    place = jnp.sum(ahead * chosen, axis=-1).astype(jnp.int32)  # [B, T, 2]; past C, one_hot is zero
    combine = jnp.einsum("btk,btke,btkc->btec", weights, chosen, jax.nn.one_hot(place, capacity))
    return combine, chosen[:, :, 0]


def moe_dense() -> Model:
    init, step = init_and_step(_MoE, _loss, adamw())
    batch = partial(text, batch=_BATCH, length=_LENGTH, vocabulary=_VOCABULARY)
    return Model("moe-dense", "NNX", init, batch, step, _LAYOUT)


def _loss(model: _MoE, batch: PyTree) -> Array:
    logits, unevenness = model(batch["tokens"])
    return cross_entropy(logits, batch["targets"]) + _BALANCE * unevenness
