"""A multilayer perceptron: a list of weights and biases, and a loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from penstock_bench.suites.shard.zoo.model import Model, PyTree
from penstock_bench.suites.shard.zoo.training import SEED, adamw, cross_entropy, init_state, normal, train_step

_WIDTHS = (512, 1024, 1024, 10)
_BATCH = 256


def mlp() -> Model:
    optimizer = adamw()
    return Model("mlp", "JAX", lambda: init_state(_init(), optimizer), _batch, train_step(_loss, optimizer))


def _init() -> PyTree:
    keys = jax.random.split(jax.random.key(SEED), len(_WIDTHS) - 1)
    layers = zip(keys, _WIDTHS[:-1], _WIDTHS[1:], strict=True)
    return [{"w": normal(key, fan_in, fan_out), "b": jnp.zeros(fan_out)} for key, fan_in, fan_out in layers]


def _loss(params: PyTree, batch: PyTree) -> Array:
    x = batch["x"]
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return cross_entropy(x @ params[-1]["w"] + params[-1]["b"], batch["y"])


def _batch(seed: int) -> PyTree:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((_BATCH, _WIDTHS[0]), np.float32)
    return {"x": x, "y": x[:, : _WIDTHS[-1]].argmax(axis=1).astype(np.int32)}
