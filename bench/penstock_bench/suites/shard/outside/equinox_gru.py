"""A GRU (Cho et al. 2014, arXiv:1406.1078) of Equinox, as in its documentation: it classifies spirals.

The documentation's example has two dimensions and 16 hidden units; here they are 64 and 768.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from penstock_bench.suites.shard.outside.batches import Batch
from penstock_bench.suites.shard.zoo.model import Model, PyTree
from penstock_bench.suites.shard.zoo.training import init_state, train_step
from penstock_bench.suites.shard.zoo.training_equinox import params_of, static_of

_BATCH, _LENGTH, _DIMENSIONS, _WIDTH = 64, 64, 64, 768


class _RNN(eqx.Module):
    """A path [T, D] → the logit of its direction []."""

    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear

    def __init__(self, key: Array):
        cell, linear = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(_DIMENSIONS, _WIDTH, key=cell)
        self.linear = eqx.nn.Linear(_WIDTH, 1, key=linear)

    def __call__(self, path: Array) -> Array:
        hidden, _ = jax.lax.scan(lambda hidden, point: (self.cell(point, hidden), None), jnp.zeros(_WIDTH), path)
        return self.linear(hidden)[0]


def gru() -> Model:
    static, optimizer = static_of(_RNN), optax.adam(1e-3)

    def loss(params: PyTree, batch: PyTree) -> Array:
        model: Any = eqx.combine(params, static)
        return optax.sigmoid_binary_cross_entropy(jax.vmap(model)(batch["paths"]), batch["labels"]).mean()

    return Model("equinox-gru", "Equinox", lambda: init_state(params_of(_RNN), optimizer), _batch, train_step(loss, optimizer))


def _batch(seed: int) -> Batch:
    """Return spirals [B, T, D], two dimensions each, and whether they turn to the left."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(2, size=_BATCH).astype(np.float32)
    times = np.linspace(0, 4 * np.pi, _LENGTH)[:, None] * (2 * labels[:, None, None] - 1)
    phases = rng.uniform(0, 2 * np.pi, size=(_BATCH, 1, _DIMENSIONS // 2)) + times
    radii = np.linspace(1, 0.1, _LENGTH)[:, None]
    return {"paths": (radii * np.concatenate([np.cos(phases), np.sin(phases)], axis=-1)).astype(np.float32), "labels": labels}
