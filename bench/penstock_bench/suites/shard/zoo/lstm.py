"""A language model of two LSTM layers (Zaremba et al. 2014, arXiv:1409.2329), each a scan over time."""

from __future__ import annotations

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from penstock_bench.suites.shard.zoo.model import Model, PyTree
from penstock_bench.suites.shard.zoo.training import adamw, cross_entropy, init_state, text, train_step
from penstock_bench.suites.shard.zoo.training_equinox import params_of, static_of

_WIDTH, _LAYERS, _VOCABULARY = 256, 2, 4096
_BATCH, _LENGTH = 64, 64


class _LSTM(eqx.Module):
    """Tokens [T] → logits [T, V]."""

    embedding: eqx.nn.Embedding
    cells: list[eqx.nn.LSTMCell]
    head: eqx.nn.Linear

    def __init__(self, key: Array):
        embedding, head, *cells = jax.random.split(key, 2 + _LAYERS)
        self.embedding = eqx.nn.Embedding(_VOCABULARY, _WIDTH, key=embedding)
        self.cells = [eqx.nn.LSTMCell(_WIDTH, _WIDTH, key=cell) for cell in cells]
        self.head = eqx.nn.Linear(_WIDTH, _VOCABULARY, key=head)

    def __call__(self, tokens: Array) -> Array:
        x = jax.vmap(self.embedding)(tokens)
        for cell in self.cells:
            x = _over_time(cell, x)
        return jax.vmap(self.head)(x)


def _over_time(cell: eqx.nn.LSTMCell, x: Array) -> Array:
    """Scan a cell over time: [T, D] → [T, D]."""

    def body(carry: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], Array]:
        carry = cell(x, carry)
        return carry, carry[0]

    start = jnp.zeros(cell.hidden_size)
    return jax.lax.scan(body, (start, start), x)[1]


def lstm() -> Model:
    optimizer, static = adamw(), static_of(_LSTM)

    def loss(params: PyTree, batch: PyTree) -> Array:
        return cross_entropy(jax.vmap(eqx.combine(params, static))(batch["tokens"]), batch["targets"])

    batch = partial(text, batch=_BATCH, length=_LENGTH, vocabulary=_VOCABULARY)
    return Model("lstm", "Equinox", lambda: init_state(params_of(_LSTM), optimizer), batch, train_step(loss, optimizer))
