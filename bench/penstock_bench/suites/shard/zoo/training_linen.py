"""Make the train step of Linen models, over Flax's own train state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import Array

from penstock_bench.suites.shard.zoo.model import PyTree
from penstock_bench.suites.shard.zoo.training import SEED, Loss

State = TypeVar("State", bound=TrainState)


def init_state(module: nn.Module, optimizer: optax.GradientTransformation, *inputs: Any) -> TrainState:
    """Return the state of a module that takes these inputs and has parameters only."""
    return create(TrainState, module, optimizer, module.init(jax.random.key(SEED), *inputs))


def create(kind: type[State], module: nn.Module, optimizer: optax.GradientTransformation, variables: PyTree) -> State:
    """Create a state whose step is an array, as it is after a step; Flax begins with a Python 0."""
    state: Any = kind.create(apply_fn=module.apply, tx=optimizer, **variables)  # type: ignore[no-untyped-call]
    return state.replace(step=jnp.zeros((), jnp.int32))


def train_step(loss: Loss) -> Callable[[TrainState, PyTree], tuple[TrainState, Array]]:
    """Return the step over the state of `init_state`."""

    def step(state: Any, batch: PyTree) -> tuple[TrainState, Array]:
        value, gradients = jax.value_and_grad(loss)(state.params, batch)
        return state.apply_gradients(grads=gradients), value

    return step
