"""Plan with google-parallax (0.0.2, https://github.com/google/parallax), where it is installed: from a step to a baseline."""

from __future__ import annotations

import traceback
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from penstock_bench.suites.shard.baselines import Baseline, Spec
from penstock_bench.suites.shard.time_limit import time_limit

NAME = "google-parallax"
_SECONDS = 60.0


class CannotPlanError(Exception):
    """An error that says why google-parallax is not here, or has no plan."""


def plan(step: Any, state: Any, batch: Any, mesh: Mesh) -> Baseline:
    """Return its layouts of the state and the batch. The batch is split over the first mesh axis, tensors over the second.

    Raises:
      CannotPlanError: it is not installed, or has no plan.
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
    """Return a layout for each leaf. Where google-parallax numbers data axes ("data0"), take the first for the mesh's."""
    data = mesh.axis_names[0]
    names = {axis: axis for axis in mesh.axis_names} | {f"{data}0": data}
    return tuple(
        tuple((names[entry],) if entry in names else () for entry in spec)
        for spec in jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    )


def _why(error: Exception) -> str:
    """Name the error and the operation that the planner was looking at, as its assertions have no message."""
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    seen = [frame["eqn"].primitive.name for frame in frames if "eqn" in frame]
    at = f" at {seen[-1]}" if seen else ""
    text = "" if isinstance(error, AssertionError) else f": {error}".splitlines()[0][:120]
    return f"{type(error).__name__}{at}{text}"
