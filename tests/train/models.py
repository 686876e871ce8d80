"""A small training whose state records which records it has seen, for the tests of `fit`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import penstock as ps

RECORDS, BATCH = 100, 8


def init(steps: int = 64) -> dict[str, Any]:
    """Return a state with parameters, a key, a count and the record numbers of each step (-1 where there was none)."""
    keys = jax.random.split(jax.random.key(1))
    return {
        "w": {"a": jax.random.normal(keys[0], (4, 16)) / 2, "b": jax.random.normal(keys[1], (16, 1)) / 4},
        "key": jax.random.key(2),
        "step": 0,
        "seen": jnp.full((steps, BATCH), -1),
    }


def step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """Train by gradient descent, with inputs that depend on the key."""
    key = jax.random.fold_in(state["key"], 1)
    x = batch["x"] + 0.01 * jnp.sin(jax.random.key_data(key)[0])  # compiles faster than jax.random.normal

    def loss(w: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["w"])
    new = {
        "w": jax.tree.map(lambda w, g: w - 0.05 * g, state["w"], gradients),
        "key": key,
        "step": state["step"] + 1,
        "seen": state["seen"].at[state["step"]].set(batch["id"]),
    }
    return new, {"loss": value, "positive": ps.Mean(jnp.sum(batch["y"] > 0), batch["y"].size)}


def evaluate(state: Any, batch: Any) -> dict[str, Any]:
    """Return the loss without noise."""
    errors = (jnp.tanh(batch["x"] @ state["w"]["a"]) @ state["w"]["b"] - batch["y"]) ** 2
    return {"loss": ps.Mean(errors.sum(), errors.size)}


def data(records: int = RECORDS) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(records, 4)).astype(np.float32)
    return {"x": x, "y": 0.3 * x.sum(1, keepdims=True), "id": np.arange(records, dtype=np.int32)}


def loader(**settings: Any) -> ps.Loader:
    return ps.Loader(data(), BATCH, **{"shuffle": True, "seed": 3, **settings})


def evaluation(every: int) -> ps.Evaluation:
    return ps.Evaluation(evaluate, ps.Loader(data(40), 8, epochs=1), every)


def ideal(steps: int) -> np.ndarray:
    """Return the record numbers of each step."""
    return np.stack([loader(process=(0, 1))[number]["id"] for number in range(steps)])


def equal(a: Any, b: Any) -> bool:
    """Return whether two states are equal bit for bit."""
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(_bits(x), _bits(y)) for x, y in leaves)


def _bits(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
