"""Score the plans and the layouts by hand of a task, in a process whose devices are virtual CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax

from penstock.errors import CompileError
from penstock.shard import Plan
from penstock.shard.hlo.analysis import Measured
from penstock.shard.mesh.hardware import find_hardware
from penstock.shard.mesh.shapes import abstract_mesh
from penstock_bench.suites.shard import planning, real, steps
from penstock_bench.suites.shard.baselines import Baseline, baselines, laid_out
from penstock_bench.suites.shard.flat_step import compile_elsewhere
from penstock_bench.suites.shard.planning import Asked, own_baselines, plan_within, reason
from penstock_bench.suites.shard.scores import BaselineScore, OwnBaseline, PlanScore
from penstock_bench.suites.shard.task import LIMITS, TIGHT, Compiler, Task
from penstock_bench.suites.shard.zoo import Model

_DTYPE = "float32"  # all steps of the zoo, and most of others, multiply in it
_REAL_DTYPE = "bfloat16"


class Found(NamedTuple):
    """The scores of a task: layouts by hand, plans for its limits, and the planner's own baselines."""

    baselines: list[BaselineScore]
    plans: list[PlanScore]
    own: list[OwnBaseline]


def start_devices(count: int) -> None:
    """Give this process virtual devices, before it has any."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def plan_path(folder: Path, task: Task, limit: str) -> Path:
    """Return the file in which the plan of a task is saved."""
    return folder / f"{task.suite}.{task.model}.{task.mesh}.{task.compiler.label}.{limit}.plan".replace(":", "-")


def asked_of(task: Task, model: Model) -> Asked:
    """Return what `ps.plan` is asked for a task."""
    state = jax.eval_shape(model.init)
    return Asked(model.step, state, model.batch(0), {"mesh": task.axes}, task.compiler, _DTYPE)


def measure_task(task: Task, folder: Path) -> Found:
    """Score the baselines of a task, and its plan for each limit.

    Args:
      folder: the plans are saved in it, and the compiler's figures for the baselines.
    """
    for limit in LIMITS:
        plan_path(folder, task, limit).unlink(missing_ok=True)  # of an earlier run
    model = steps.load(task.suite, task.model)
    asked = asked_of(task, model)
    made: list[tuple[PlanScore, Plan | None]] = []
    loose = find_hardware(task.compiler.hardware).memory
    if "loose" in task.limits:  # first, because its planning is timed: nothing is traced yet
        made.append(plan_within(asked, "loose", loose))
    layouts = baselines(model, asked.state, asked.batch, task.axes)
    tried = score_layouts(model, asked, layouts, task.axes, folder)
    limits = _limits(tried)
    made += [plan_within(asked, limit, limits[limit]) for limit in task.limits if limit != "loose"]
    for score, found in made:
        if found is not None and score.score is not None:
            found.save(plan_path(folder, task, score.limit))
    first = next((found for _, found in made if found is not None), None)
    own = own_baselines(asked, first) if first and task.compared_with_own_baselines else []
    return Found(tried, [score for score, _ in made], own)


def _limits(tried: Sequence[BaselineScore]) -> dict[str, int | None]:
    """Return the limits in bytes that the layouts by hand set, of which data parallel is the first."""
    replicated = tried[0].score
    sizes = [each.score.memory for each in tried if each.score]
    return {"half": replicated.memory // 2 if replicated else None, "tight": int(TIGHT * min(sizes)) if sizes else None}


def score_layouts(
    model: Model, asked: Asked, layouts: Sequence[Baseline], axes: dict[str, int], folder: Path
) -> list[BaselineScore]:
    """Compile a step in layouts by hand with the compiler that judges, and score them.

    Args:
      folder: the compiler's figures are kept in it.
    """
    scores, flat = {}, {}
    for layout in layouts:
        try:
            flat[layout.name] = laid_out(model, asked.state, asked.batch, layout, abstract_mesh(axes))
        except ValueError as error:  # a dimension that its mesh axes do not divide
            scores[layout.name] = BaselineScore(layout.name, None, f"does not fit the shapes: {reason(error)}")
    results = compile_elsewhere(list(flat.values()), asked.compiler.topology, kept_in(folder))
    for name, result in zip(flat, results, strict=True):
        scores[name] = _attempt(name, asked, partial(_given, result), axes)
    return [scores[layout.name] for layout in layouts]


def kept_in(folder: Path) -> Path:
    """Return the folder for the compiler's figures."""
    return folder / "compiled"


def _given(result: Measured | CompileError) -> Measured:
    if isinstance(result, CompileError):
        raise result
    return result


def _attempt(name: str, asked: Asked, measured: Callable[[], Measured], mesh: dict[str, int]) -> BaselineScore:
    """Score a layout on a mesh, or say why it has no score."""
    try:
        return BaselineScore(name, asked.score(measured(), mesh))
    except Exception as error:
        return BaselineScore(name, None, f"does not compile: {reason(error)}")


def asked_of_case(case: real.Case, compiler: Compiler) -> Asked:
    """Return what `ps.plan` is asked for a case: the number of devices, for which it searches a mesh too."""
    where = {"devices": case.devices}
    return Asked(case.step, jax.eval_shape(case.init), case.batch, where, compiler, _REAL_DTYPE)


def measure_case(task: Task, folder: Path) -> Found:
    """Score the layouts by hand of a case of real size, and the plan for the memory of its chips.

    Args:
      folder: the figures of the layouts by hand are kept in it, so that a run that was interrupted goes on.
    """
    case = real.load(task.model)
    asked = asked_of_case(case, task.compiler)
    score, _ = plan_within(asked, "loose", find_hardware(task.compiler.hardware).memory)
    tried = [
        _attempt(layout.name, asked, partial(real.measure_layout, case, layout, case.topology, kept_in(folder)), layout.mesh)
        for layout in case.layouts
    ]
    return Found(tried, [score], [])  # the planner's own baselines would take as long as the layouts by hand


def plan_case(name: str) -> float:
    """Return the seconds to plan for a case whose layers are unrolled, without compilation."""
    case = real.load(name, unrolled=True)
    asked = asked_of_case(case, Compiler.of_label(case.topology))
    return planning.search(asked, find_hardware(asked.compiler.hardware).memory)[0]
