"""BERT (Devlin et al. 2019, arXiv:1810.04805) of Equinox's layers, as in its documentation: it classifies sentences.

The size is from google/bert_uncased_L-4_H-256_A-4 (Turc et al. 2019, arXiv:1908.08962), whose vocabulary does not divide.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from penstock_bench.suites.shard.outside.batches import Batch, masked_text
from penstock_bench.suites.shard.zoo.model import Layout, Model, PyTree
from penstock_bench.suites.shard.zoo.training import SEED, adamw, cross_entropy
from penstock_bench.suites.shard.zoo.training_equinox import params_of, static_of

_BATCH, _LENGTH, _CLASSES = 32, 128, 2
_WIDTH, _LAYERS, _HEADS, _VOCABULARY = 256, 4, 4, 30522

# Weights are [out, in].
_LAYOUT: Layout = (
    ("(query|key|value)_proj/weight$", ("model", None)),
    ("output_proj/weight$", (None, "model")),
    ("widen/weight$", ("model", None)),
    ("widen/bias$", ("model",)),
    ("narrow/weight$", (None, "model")),
)


class _Block(eqx.Module):
    """[T, D] → the same."""

    attention: eqx.nn.MultiheadAttention
    attention_norm: eqx.nn.LayerNorm
    widen: eqx.nn.Linear
    narrow: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, key: Array):
        attention, widen, narrow = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(_HEADS, _WIDTH, dropout_p=0.1, key=attention)
        self.attention_norm = eqx.nn.LayerNorm(_WIDTH)
        self.widen = eqx.nn.Linear(_WIDTH, 4 * _WIDTH, key=widen)
        self.narrow = eqx.nn.Linear(4 * _WIDTH, _WIDTH, key=narrow)
        self.norm = eqx.nn.LayerNorm(_WIDTH)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x: Array, mask: Array, key: Array) -> Array:
        attention, first, second = jax.random.split(key, 3)
        mixed = self.attention(x, x, x, mask=jnp.broadcast_to(mask, (len(mask), len(mask))), key=attention)
        x = jax.vmap(self.attention_norm)(x + self.dropout(mixed, key=first))
        hidden = jax.vmap(self.narrow)(jax.nn.gelu(jax.vmap(self.widen)(x)))
        return jax.vmap(self.norm)(x + self.dropout(hidden, key=second))


class _Classifier(eqx.Module):
    """Tokens [T] and their mask [T] → logits [classes]."""

    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    blocks: list[_Block]
    pooler: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key: Array):
        tokens, positions, pooler, head, *blocks = jax.random.split(key, 4 + _LAYERS)
        self.tokens = eqx.nn.Embedding(_VOCABULARY, _WIDTH, key=tokens)
        self.positions = eqx.nn.Embedding(_LENGTH, _WIDTH, key=positions)
        self.norm = eqx.nn.LayerNorm(_WIDTH)
        self.blocks = [_Block(block) for block in blocks]
        self.pooler = eqx.nn.Linear(_WIDTH, _WIDTH, key=pooler)
        self.head = eqx.nn.Linear(_WIDTH, _CLASSES, key=head)

    def __call__(self, tokens: Array, mask: Array, key: Array) -> Array:
        x = jax.vmap(self.tokens)(tokens) + jax.vmap(self.positions)(jnp.arange(_LENGTH))
        x = jax.vmap(self.norm)(x)
        for block, block_key in zip(self.blocks, jax.random.split(key, _LAYERS), strict=True):
            x = block(x, mask == 1, block_key)
        return self.head(jnp.tanh(self.pooler(x[0])))


def bert() -> Model:
    static, optimizer = static_of(_Classifier), adamw()

    def init() -> PyTree:
        params = params_of(_Classifier)
        return {"params": params, "optimizer": optimizer.init(params), "key": jax.random.key(SEED + 1)}

    def loss(params: PyTree, batch: PyTree, key: Array) -> Array:
        model: Any = eqx.combine(params, static)
        logits = jax.vmap(model)(batch["input_ids"], batch["attention_mask"], jax.random.split(key, _BATCH))
        return cross_entropy(logits, batch["labels"])

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, Array]:
        key, next_key = jax.random.split(state["key"])
        value, gradients = jax.value_and_grad(loss)(state["params"], batch, key)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments, "key": next_key}, value

    return Model("equinox-bert", "Equinox", init, _batch, step, _LAYOUT)


def _batch(seed: int) -> Batch:
    """Return sentences, and as their labels whether the first token is one of the frequent half."""
    texts = masked_text(seed, _BATCH, _LENGTH, _VOCABULARY, mask=0, masked=0.0)
    labels = (texts["input_ids"][:, 0] < np.median(texts["input_ids"][:, 0])).astype(np.int32)
    return {"input_ids": texts["input_ids"], "attention_mask": texts["attention_mask"], "labels": labels}
