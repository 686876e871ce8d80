"""Compile the plans and the baselines of a model on a mesh, and score them, in a process whose devices are virtual CPUs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from penstock.bench.suites.shard import baselines, parallax
from penstock.bench.suites.shard.scores import BaselineScore, PlanScore, Prediction, Score
from penstock.bench.suites.shard.task import Task
from penstock.bench.suites.shard.time_limit import time_limit
from penstock.bench.suites.shard.zoo import Model, load
from penstock.shard import CompileError, Hardware, Plan, PlanError, plan
from penstock.shard.hlo.analysis import Measured
from penstock.shard.mesh.lookup import find_hardware

_PLANNING_LIMIT = 120.0  # seconds, after which a plan is given up
_DTYPE = "float32"  # all models of the zoo multiply in it


def start_devices(count: int) -> None:
    """Give this process virtual devices, before it has any."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def mesh_of(axes: dict[str, int]) -> Mesh:
    """Return a mesh of this process's devices."""
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def plan_path(folder: Path, task: Task, limit: str) -> Path:
    """Return the file in which the plan of a task is saved."""
    return folder / f"{task.model}.{task.mesh}.{limit}.plan"


def measure_task(task: Task, folder: Path) -> tuple[list[BaselineScore], list[PlanScore]]:
    """Score the baselines of a task, and its plan for each limit.

    Args:
      folder: the plans are saved in it.
    """
    model, axes = load(task.model), task.axes
    state, batch = jax.eval_shape(model.init), model.batch(0)
    mesh = mesh_of(axes)

    def score(layout: baselines.Baseline) -> Score:
        return score_of(baselines.compiled(model, state, batch, layout, mesh), task.hardware)

    tried = [_attempt(layout.name, partial(score, layout)) for layout in baselines.baselines(model, state, batch, axes)]
    tried.append(_attempt(parallax.NAME, lambda: score(parallax.plan(model.step, state, batch, mesh))))
    replicated = tried[0].score
    limits = {"loose": find_hardware(task.hardware).memory, "half": replicated.memory // 2 if replicated else None}
    planned = [_planned(model, state, batch, task, limit, limits[limit], plan_path(folder, task, limit)) for limit in task.limits]
    return tried, planned


def hardware_of(task: Task) -> Hardware:
    """Return the hardware of a task under a name of its own, so that the compiler of this machine decides what fits.

    Plans and baselines are scored by that compiler, also where the TPU's is installed.
    """
    return replace(find_hardware(task.hardware), name=f"{task.hardware}, compiled for CPU", platform="cpu")


def score_of(measured: Measured, on: str) -> Score:
    """Return the compiler's measurements as the score of a plan, on this hardware."""
    counts: Counter[str] = Counter()
    for each in measured.collectives:
        guessed = " (guessed)" if each.guessed else ""
        counts[f"{each.kind} over {', '.join(each.axes) or 'a part of an axis'}{guessed}"] += round(each.count)
    return Score(
        seconds=measured.seconds(on, _DTYPE),
        memory=measured.memory,
        arguments=measured.arguments,
        bytes_on_wire=measured.bytes_on_wire,
        flops=measured.flops,
        collectives=tuple(f"{count} {what}" for what, count in counts.most_common()),
        unknown=measured.unknown,
    )


def _attempt(name: str, score: Callable[[], Score]) -> BaselineScore:
    """Score a baseline, or say why it has no score."""
    try:
        return BaselineScore(name, score())
    except parallax.CannotPlanError as error:
        return BaselineScore(name, None, f"cannot plan: {error}")
    except Exception as error:
        return BaselineScore(name, None, f"does not compile: {reason(error)}")


def _planned(model: Model, state: Any, batch: Any, task: Task, limit: str, size: int | None, path: Path) -> PlanScore:
    """Plan within a limit of `size` bytes, score the plan and save it; or say why there is no score."""
    if size is None:
        return PlanScore(limit, None, reason="data parallel, which sets the limit, has no score")
    begin = time.perf_counter()
    try:
        with time_limit(_PLANNING_LIMIT):
            made = plan(model.step, state, batch, mesh=task.axes, hardware=hardware_of(task), memory=size)
    except PlanError as error:
        return PlanScore(limit, size, time.perf_counter() - begin, reason=reason(error, 1000), refused=True)
    except Exception as error:
        return PlanScore(limit, size, time.perf_counter() - begin, reason=f"planning failed: {reason(error, 1000)}")
    took = time.perf_counter() - begin
    predicted = _prediction(made)
    try:
        score = score_of(made.verify().measured, task.hardware)
        made.save(path)
    except Exception as error:
        return PlanScore(limit, size, took, predicted=predicted, reason=f"does not compile: {reason(error, 1000)}")
    return PlanScore(limit, size, took, score, predicted)


def _prediction(made: Plan) -> Prediction:
    """Return the bytes that the planner predicted."""
    return Prediction(made.cost.memory.arguments, made.cost.memory.total, made.cost.bytes_on_wire)


def reason(error: Exception, most: int = 300) -> str:
    """Return the kind of an error and its text, cut where it is long."""
    text = " ".join(str(error).split())
    kind = "" if isinstance(error, PlanError | CompileError) else f"{type(error).__name__}: "
    return kind + (text if len(text) <= most else f"{text[:most]}…")
