"""The train state of Linen models."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from penstock.bench.suites.shard.zoo.training import SEED


def init_state(module: nn.Module, optimizer: optax.GradientTransformation, *inputs: Any) -> TrainState:
    """Of a module that takes these inputs and has parameters only."""
    params = module.init(jax.random.key(SEED), *inputs)["params"]
    return array_step(TrainState.create(apply_fn=module.apply, params=params, tx=optimizer))


def array_step(state: TrainState) -> TrainState:
    """Flax begins with a Python 0, which after a step is an array."""
    return state.replace(step=jnp.zeros((), jnp.int32))
