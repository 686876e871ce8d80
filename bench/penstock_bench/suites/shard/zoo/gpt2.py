"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm before each part, GELU, output weights tied to the embedding."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import Array

from penstock_bench.suites.shard.zoo.model import Layout, Model, PyTree
from penstock_bench.suites.shard.zoo.training import adamw, cross_entropy, text
from penstock_bench.suites.shard.zoo.training_linen import init_state, train_step

_WIDTH, _LAYERS, _HEADS, _VOCABULARY = 256, 4, 8, 8192
_BATCH, _LENGTH = 16, 128

_LAYOUT: Layout = (
    ("qkv/kernel$", (None, None, "model", None)),
    ("qkv/bias$", (None, "model", None)),
    ("project/kernel$", ("model", None, None)),
    ("widen/kernel$", (None, "model")),
    ("widen/bias$", ("model",)),
    ("narrow/kernel$", ("model", None)),
    ("token/embedding$", ("model", None)),
)


class _GPT2(nn.Module):
    """Tokens [B, T] → logits [B, T, V]."""

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        initializer = nn.initializers.normal(0.02)
        token = nn.Embed(_VOCABULARY, _WIDTH, embedding_init=initializer, name="token")
        position = nn.Embed(_LENGTH, _WIDTH, embedding_init=initializer, name="position")
        x = token(tokens) + position(jnp.arange(tokens.shape[1]))
        for layer in range(_LAYERS):
            x = _Block(name=f"block{layer}")(x)
        return token.attend(nn.LayerNorm()(x))


class _Block(nn.Module):
    """[B, T, D] → the same."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        qkv = nn.DenseGeneral((3, _HEADS, _WIDTH // _HEADS), name="qkv")(nn.LayerNorm()(x))
        query, key, value = (qkv[:, :, part] for part in range(3))
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + nn.DenseGeneral(_WIDTH, axis=(-2, -1), name="project")(mixed)
        hidden = nn.gelu(nn.Dense(4 * _WIDTH, name="widen")(nn.LayerNorm()(x)))
        return x + nn.Dense(_WIDTH, name="narrow")(hidden)


def gpt2() -> Model:
    module, optimizer = _GPT2(), adamw()

    def init() -> TrainState:
        return init_state(module, optimizer, jnp.zeros((1, _LENGTH), jnp.int32))

    def loss(params: PyTree, batch: PyTree) -> Array:
        logits: Any = module.apply({"params": params}, batch["tokens"])
        return cross_entropy(logits, batch["targets"])

    batch = partial(text, batch=_BATCH, length=_LENGTH, vocabulary=_VOCABULARY)
    return Model("gpt2", "Linen", init, batch, train_step(loss), _LAYOUT)
