"""Retrieval by two towers (Yi et al. 2019, doi:10.1145/3298689.3346996).

Users and items are embedded. The loss asks for each user's item among the items of all users of the batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from penstock_bench.suites.shard.zoo.model import Model, PyTree
from penstock_bench.suites.shard.zoo.training import SEED, adamw, cross_entropy, init_state, normal, train_step

_ITEMS = 100_000
_EMBEDDING, _FEATURES = 16, 16
_HIDDEN, _OUT = 128, 64
_BATCH = 1024
_TEMPERATURE = 0.1


def two_tower(rows: int = 10_000_000) -> Model:
    """Return the model.

    Args:
      rows: rows of the table of users, with 16 floats each. The optimizer keeps two more tables of this size.
    """
    optimizer = adamw()

    def init() -> PyTree:
        user, item = jax.random.split(jax.random.key(SEED))
        return init_state({"user": _init_tower(user, rows), "item": _init_tower(item, _ITEMS)}, optimizer)

    def batch(seed: int) -> PyTree:
        rng = np.random.default_rng(seed)
        return {"user": _draw(rng, rows), "item": _draw(rng, _ITEMS)}

    return Model("two-tower", "JAX", init, batch, train_step(_loss, optimizer))


def _init_tower(key: Array, rows: int) -> PyTree:
    table, hidden, out = jax.random.split(key, 3)
    return {
        "table": jax.random.normal(table, (rows, _EMBEDDING)),
        "hidden": {"w": normal(hidden, _EMBEDDING + _FEATURES, _HIDDEN), "b": jnp.zeros(_HIDDEN)},
        "out": {"w": normal(out, _HIDDEN, _OUT), "b": jnp.zeros(_OUT)},
    }


def _draw(rng: np.random.Generator, rows: int) -> PyTree:
    return {
        "id": rng.integers(rows, size=_BATCH, dtype=np.int32),
        "features": rng.standard_normal((_BATCH, _FEATURES), np.float32),
    }


def _loss(params: PyTree, batch: PyTree) -> Array:
    user, item = _tower(params["user"], batch["user"]), _tower(params["item"], batch["item"])
    return cross_entropy(user @ item.T / _TEMPERATURE, jnp.arange(len(user)))


def _tower(params: PyTree, batch: PyTree) -> Array:
    """Embed ids [B] and features [B, F] as unit vectors [B, D]."""
    x = jnp.concatenate([params["table"][batch["id"]], batch["features"]], axis=-1)
    x = jax.nn.relu(x @ params["hidden"]["w"] + params["hidden"]["b"])
    x = x @ params["out"]["w"] + params["out"]["b"]
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-12)
