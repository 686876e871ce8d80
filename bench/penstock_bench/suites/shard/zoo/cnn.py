"""A small convolutional network with batch normalisation, whose running means the step carries along."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import Array

from penstock_bench.suites.shard.zoo.model import Model, PyTree
from penstock_bench.suites.shard.zoo.training import SEED, adamw, cross_entropy, pictures
from penstock_bench.suites.shard.zoo.training_linen import create

_CHANNELS = (16, 32, 64)
_SIZE, _CLASSES, _BATCH = 32, 10, 128


class _CNN(nn.Module):
    """Images [B, S, S, 3] → logits [B, classes]."""

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        for channels in _CHANNELS:
            x = nn.Conv(channels, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))  # type: ignore[no-untyped-call]
        x = nn.relu(nn.Dense(128)(x.reshape(len(x), -1)))
        return nn.Dense(_CLASSES)(x)


class _State(TrainState):  # type: ignore[no-untyped-call]  # Flax's own, without annotations
    batch_stats: Any


def cnn() -> Model:
    module, optimizer = _CNN(), adamw()

    def init() -> _State:
        variables = module.init(jax.random.key(SEED), jnp.zeros((1, _SIZE, _SIZE, 3)), train=False)
        return create(_State, module, optimizer, variables)

    def step(state: Any, batch: PyTree) -> tuple[_State, Array]:
        def loss(params: PyTree) -> tuple[Array, PyTree]:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updated = module.apply(variables, batch["images"], train=True, mutable=["batch_stats"])
            return cross_entropy(logits, batch["labels"]), updated["batch_stats"]

        (value, batch_stats), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients, batch_stats=batch_stats), value

    batch = partial(pictures, batch=_BATCH, size=_SIZE, channels=3, classes=_CLASSES)
    return Model("cnn-batchnorm", "Linen", init, batch, step)
