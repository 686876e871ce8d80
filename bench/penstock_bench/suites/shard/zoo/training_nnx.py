"""Make the train step of NNX models: modules outside of it, arrays across it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import optax
from flax import nnx
from jax import Array

from penstock_bench.suites.shard.zoo.model import PyTree
from penstock_bench.suites.shard.zoo.training import SEED

Module = TypeVar("Module", bound=nnx.Module)
Init = Callable[[], PyTree]
Step = Callable[[PyTree, PyTree], tuple[PyTree, Array]]


def init_and_step(
    make: Callable[[nnx.Rngs], Module],
    loss: Callable[[Module, PyTree], Array],
    transformation: optax.GradientTransformation,
) -> tuple[Init, Step]:
    """Return, for a `Model`, the state {"model", "optimizer"} of a module and its `nnx.Optimizer`, and the step over it."""

    def modules() -> tuple[Module, nnx.Optimizer]:
        model = make(nnx.Rngs(SEED))
        return model, nnx.Optimizer(model, transformation, wrt=nnx.Param)

    model_graph, optimizer_graph = (nnx.graphdef(module) for module in nnx.eval_shape(modules))

    def state_of(model: Module, optimizer: nnx.Optimizer) -> PyTree:
        return {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}

    def init() -> PyTree:
        return state_of(*modules())

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, Array]:
        model = nnx.merge(model_graph, state["model"])
        optimizer = nnx.merge(optimizer_graph, state["optimizer"])
        value, gradients = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, gradients)
        return state_of(model, optimizer), value

    return init, step
