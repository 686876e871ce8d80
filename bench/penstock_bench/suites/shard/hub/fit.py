"""Fit a backbone of Keras Hub under `AutoShardDistribution`, and compare it with one device.

In: a planning task, and the folder with its plan for the tight limit. Out: the measurement of one training, in this process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from penstock._bytes import format_bytes
from penstock.errors import PlanError
from penstock.shard import Plan
from penstock_bench.model import Measurement, Remarks
from penstock_bench.suites.shard import measure
from penstock_bench.suites.shard.hub import trained
from penstock_bench.suites.shard.hub.step import sample
from penstock_bench.suites.shard.planning import hardware_of
from penstock_bench.suites.shard.task import Task

_STEPS = 3
_TRIES = 12
_STEP = 0.01
"""How near the least limit is to one that nothing fits, relative to it."""
_SHARDED = 1.15
"""The bytes of parameters on a device, over an eighth of all, with which they count as sharded."""


def fit(task: Task, plans: Path) -> Measurement:
    """Train three steps on one device and under a plan, and then once more.

    Args:
      plans: the folder with the plans of `measure_task`; the limit is of the tight one.

    Returns:
      The largest relative difference of a loss; the bytes that a device holds of the parameters, over their eighth; the largest
      array on a device while the model is built, over the largest shard of the plan; the seconds to plan; and the seconds of
      a second fit.
    """
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    import penstock.keras as pk

    path = measure.plan_path(plans, task, "tight")
    limit = Plan.load(path).limit if path.exists() else None
    keras.backend.clear_session()  # not inside of a scope, as it forgets the distribution
    alone, _ = _train(task.model, trained)
    keras.backend.clear_session()
    mesh = keras.distribution.DeviceMesh(tuple(task.axes.values()), list(task.axes))
    hardware = hardware_of(task.compiler)
    distribution = pk.AutoShardDistribution(mesh, hardware=hardware, memory=limit)
    largest = _Largest()
    with distribution.scope():
        planned, model = _train(task.model, largest.watch(trained))
        first = distribution.planning_seconds
        _fit(model, task.model)
    plan = distribution.plans["train"]
    shard = max(_on_one_device(each.value) for each in model.variables)
    least, share, refused = _shard_parameters(
        model, task, plan, lambda limit: pk.AutoShardDistribution(mesh, hardware=hardware, memory=limit)
    )
    difference = max(abs(one - other) / abs(other) for one, other in zip(planned, alone, strict=True))
    values = {
        "difference": difference,
        "parameters": share * task.devices,
        "largest array": largest.bytes / shard,
        "planning": first,
        "second fit": distribution.planning_seconds - first,
    }
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    return Measurement(
        finite,
        {"alone": alone, "planned": planned, "limit": limit, "least": least},
        remarks=Remarks(
            {
                "limit": "tight" if limit else "loose",
                "least limit": format_bytes(least),
                "on one device": _listed(alone),
                "under the plan": _listed(planned),
            },
            notes=list(plan.remarks),
            missed=dict.fromkeys(set(values) - set(finite), "it is not finite"),
            exempt={"parameters": f"nothing fits a limit {_STEP:.0%} lower, so none asks for more shards"} if refused else {},
        ),
    )


def _shard_parameters(model: Any, task: Task, plan: Plan, distribution_of: Callable[[int], Any]) -> tuple[int, float, bool]:
    """Find a limit that asks for sharded parameters, or the least that a plan keeps, by bisection.

    Args:
      model: a model that is trained by a plan.
      plan: the plan.
      distribution_of: a distribution for a limit in bytes.

    Returns:
      The last limit that a plan keeps, the share of the bytes of the model's variables that a device then holds, and whether
      nothing fits a limit that is lower by `_STEP`.
    """
    total = sum(each.value.nbytes for each in model.variables)

    def share() -> float:
        return sum(_on_one_device(each.value) for each in model.variables) / total

    limit = plan.limit
    too_low = total // task.devices  # the step needs memory beside its parameters
    for _ in range(_TRIES):
        if share() * task.devices <= _SHARDED:
            break
        memory = (plan.checked or plan.verify().measured).memory
        if memory <= (1 + _STEP) * too_low:
            return limit, share(), True
        lower = (memory + too_low) // 2
        try:
            plan = distribution_of(lower).shard(model, sample(task.model, 0))
            limit = lower
        except PlanError:
            too_low = lower
    return limit, share(), False


class _Largest:
    """The most bytes that one device held of an array, of all that lived when a variable of Keras had been created."""

    def __init__(self) -> None:
        self.bytes = 0

    def watch(self, build: Callable[[str], Any]) -> Callable[[str], Any]:
        """Return a function that builds a model as another does, and looks at all arrays after each variable."""
        from keras.src import backend

        create = backend.Variable.__init__
        before = {id(each): each for each in jax.live_arrays()}  # kept, so that no new array has the identity of an old one

        def created(variable: Any, *args: Any, **options: Any) -> None:
            create(variable, *args, **options)
            new = [each for each in jax.live_arrays() if id(each) not in before]
            self.bytes = max([self.bytes, *map(_on_one_device, new)])

        def watched(name: str) -> Any:
            backend.Variable.__init__ = created
            try:
                return build(name)
            finally:
                backend.Variable.__init__ = create

        return watched


def _on_one_device(array: jax.Array) -> int:
    """Return the bytes of an array that one device holds."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _train(name: str, build: Callable[[str], Any]) -> tuple[list[float], Any]:
    """Build a model from fixed seeds and train it; return its losses and the model."""
    import keras

    keras.utils.set_random_seed(0)
    model = build(name)
    return _fit(model, name), model


def _fit(model: Any, name: str) -> list[float]:
    """Return the loss of each step of an epoch of three batches."""
    import keras

    losses: list[float] = []
    batches = [sample(name, seed) for seed in range(_STEPS)]
    inputs = {key: np.concatenate([x[key] for x, _ in batches]) for key in batches[0][0]}
    targets = np.concatenate([y for _, y in batches])
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(float(logs["loss"])))
    model.fit(inputs, targets, batch_size=len(batches[0][1]), shuffle=False, verbose=0, callbacks=[note])
    return losses


def _listed(losses: list[float]) -> str:
    return ", ".join(f"{loss:.5g}" for loss in losses)
