"""The planner of google-parallax (0.0.2, https://github.com/google/parallax), where it is installed."""

from __future__ import annotations

import traceback
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from penstock.bench.suites.shard.baselines import Baseline, Spec
from penstock.bench.suites.shard.time_limit import time_limit

NAME = "google-parallax"
_SECONDS = 60.0


class CannotPlanError(Exception):
    """It is not here, or has no plan for this; the text says why."""


def plan(step: Any, state: Any, batch: Any, mesh: Mesh) -> Baseline:
    """Its layouts of the state and the batch. The batch is split over the first mesh axis, tensors over the second.

    Raises:
      CannotPlanError: it does not.
    """
    try:
        from parallax.sharding.auto_shard import get_shardings
    except ImportError as error:
        raise CannotPlanError(f"not installed ({error}): pip install google-parallax") from None
    if len(mesh.axis_names) != 2:
        raise CannotPlanError("plans for meshes of two axes only")
    data, tensor = mesh.axis_names
    try:
        with jax.set_mesh(mesh), time_limit(_SECONDS):
            (states, batches), _ = get_shardings(step, state, batch, data_axis_name=data, model_axis_name=tensor)
    except Exception as error:
        raise CannotPlanError(_why(error)) from error
    return Baseline(NAME, _specs(states, mesh), _specs(batches, mesh))


def _specs(tree: Any, mesh: Mesh) -> tuple[Spec, ...]:
    """It numbers the data axes where it finds several, "data0" and so on: the first of them is taken for that of the mesh."""
    data = mesh.axis_names[0]
    names = {axis: axis for axis in mesh.axis_names} | {f"{data}0": data}
    return tuple(
        tuple((names[entry],) if entry in names else () for entry in spec)
        for spec in jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    )


def _why(error: Exception) -> str:
    """Its assertions have no message; the operation that it was looking at says more."""
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    seen = [frame["eqn"].primitive.name for frame in frames if "eqn" in frame]
    at = f" at {seen[-1]}" if seen else ""
    text = "" if isinstance(error, AssertionError) else f": {error}".splitlines()[0][:120]
    return f"{type(error).__name__}{at}{text}"
