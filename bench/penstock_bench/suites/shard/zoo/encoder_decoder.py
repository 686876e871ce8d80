"""The translator of "Attention is all you need" (Vaswani et al. 2017, arXiv:1706.03762), normalised before each part.

Sentences are padded: attention does not see the padding, and the loss does not count it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import Array

from penstock_bench.suites.shard.zoo.model import Layout, Model, PyTree
from penstock_bench.suites.shard.zoo.training import adamw
from penstock_bench.suites.shard.zoo.training_linen import init_state, train_step

_WIDTH, _LAYERS, _HEADS, _HIDDEN, _VOCABULARY = 256, 2, 8, 1024, 4096
_BATCH, _SOURCE, _TARGET = 32, 128, 64
_PADDING = 0

_LAYOUT: Layout = (
    ("(query|key|value)/kernel$", (None, "model", None)),
    ("(query|key|value)/bias$", ("model", None)),
    ("out/kernel$", ("model", None, None)),
    ("widen/kernel$", (None, "model")),
    ("widen/bias$", ("model",)),
    ("narrow/kernel$", ("model", None)),
    ("token/embedding$", ("model", None)),
)


class _EncoderDecoder(nn.Module):
    """Source [B, S] and target [B, T] → logits [B, T, V]."""

    @nn.compact
    def __call__(self, source: Array, target: Array) -> Array:
        token = nn.Embed(_VOCABULARY, _WIDTH, embedding_init=nn.initializers.normal(_WIDTH**-0.5), name="token")
        seen = source != _PADDING
        memory = token(source) * _WIDTH**0.5 + _positions(source.shape[1])
        for layer in range(_LAYERS):
            memory = _Encoder(name=f"encoder{layer}")(memory, nn.make_attention_mask(seen, seen))
        memory = nn.LayerNorm()(memory)
        cross = nn.make_attention_mask(target != _PADDING, seen)
        x = token(target) * _WIDTH**0.5 + _positions(target.shape[1])
        for layer in range(_LAYERS):
            x = _Decoder(name=f"decoder{layer}")(x, memory, nn.make_causal_mask(target), cross)
        return token.attend(nn.LayerNorm()(x))


class _Encoder(nn.Module):
    """[B, S, D], attention mask [B, 1, S, S] → [B, S, D]."""

    @nn.compact
    def __call__(self, x: Array, mask: Array) -> Array:
        x = x + nn.MultiHeadDotProductAttention(_HEADS)(nn.LayerNorm()(x), mask=mask)
        return x + _MLP()(nn.LayerNorm()(x))


class _Decoder(nn.Module):
    """[B, T, D], memory [B, S, D], attention masks [B, 1, T, T] and [B, 1, T, S] → [B, T, D]."""

    @nn.compact
    def __call__(self, x: Array, memory: Array, causal: Array, cross: Array) -> Array:
        x = x + nn.MultiHeadDotProductAttention(_HEADS)(nn.LayerNorm()(x), mask=causal)
        x = x + nn.MultiHeadDotProductAttention(_HEADS)(nn.LayerNorm()(x), memory, mask=cross)
        return x + _MLP()(nn.LayerNorm()(x))


class _MLP(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        return nn.Dense(_WIDTH, name="narrow")(nn.relu(nn.Dense(_HIDDEN, name="widen")(x)))


def _positions(length: int) -> Array:
    """Return sines and cosines of the position, section 3.5: [T, D]."""
    frequencies = 10_000.0 ** (-jnp.arange(_WIDTH // 2) / (_WIDTH // 2))
    angles = jnp.arange(length)[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def encoder_decoder() -> Model:
    module, optimizer = _EncoderDecoder(), adamw()

    def init() -> TrainState:
        return init_state(module, optimizer, jnp.zeros((1, _SOURCE), jnp.int32), jnp.zeros((1, _TARGET), jnp.int32))

    def loss(params: PyTree, batch: PyTree) -> Array:
        logits: Any = module.apply({"params": params}, batch["source"], batch["target"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])
        counted = batch["next"] != _PADDING
        return jnp.sum(losses * counted) / jnp.sum(counted)

    return Model("encoder-decoder", "Linen", init, _batch, train_step(loss), _LAYOUT)


def _batch(seed: int) -> PyTree:
    rng = np.random.default_rng(seed)
    target = _sentences(rng, _TARGET + 1)
    return {"source": _sentences(rng, _SOURCE), "target": target[:, :-1], "next": target[:, 1:]}


def _sentences(rng: np.random.Generator, length: int) -> np.ndarray:
    """Return random sentences [B, T] int32, at least half of each not padding."""
    tokens = 1 + ((_VOCABULARY - 1) * rng.random((_BATCH, length)) ** 4).astype(np.int32)
    lengths = rng.integers(length // 2, length, size=(_BATCH, 1), endpoint=True)
    return np.where(np.arange(length) < lengths, tokens, np.int32(_PADDING))
