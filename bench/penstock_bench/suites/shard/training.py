"""Train some steps under a plan and on one device, and return the losses of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from penstock.shard import Plan
from penstock.shard.compiler import FAST_COMPILE
from penstock.shard.mesh.hardware import find_hardware
from penstock_bench.suites.shard import measure, steps
from penstock_bench.suites.shard.baselines import baselines
from penstock_bench.suites.shard.planning import plan_within
from penstock_bench.suites.shard.scores import Losses
from penstock_bench.suites.shard.task import Task
from penstock_bench.suites.shard.zoo import Model
from penstock_bench.suites.shard.zoo import load as load_zoo

_STEPS = 3
# Eight copies of the published table do not fit into the memory of a common machine.
_ROWS = {"two-tower": 65_536}


def train(task: Task, plans: Path) -> Losses | None:
    """Train some steps on one device and under the plan for the smaller limit, which shards more.

    Args:
      plans: folder with the plans of `measure_task`.

    Returns:
      None where there is no plan.
    """
    limit = next((limit for limit in ("half", "tight", "loose") if measure.plan_path(plans, task, limit).exists()), None)
    if limit is None:
        return None
    rows = _ROWS.get(task.model)
    model = load_zoo(task.model, rows=rows) if rows else steps.load(task.suite, task.model)
    if rows:
        made, limit = _plan_anew(model, task, plans)
    else:
        saved = Plan.load(measure.plan_path(plans, task, limit))
        made = saved.bind(model.step, jax.eval_shape(model.init), model.batch(0))
    batches = [model.batch(seed) for seed in range(_STEPS)]
    planned = made.jit(model.step, donate_argnums=0, compiler_options=FAST_COMPILE)
    under_plan = _losses(planned, made.put(model.init()), [made.put(batch) for batch in batches])
    alone = _losses(jax.jit(model.step, donate_argnums=0, compiler_options=FAST_COMPILE), model.init(), batches)
    return Losses(alone, under_plan, limit, f"a table of {rows:,} rows" if rows else "")


def _losses(step: Callable, state: Any, batches: list[Any]) -> tuple[float, ...]:
    """Return the loss of each step."""
    found = []
    for batch in batches:
        state, loss = step(state, batch)
        found.append(float(loss))
    return tuple(found)


def _plan_anew(model: Model, task: Task, folder: Path) -> tuple[Plan, str]:
    """Plan for a model of another size, with half of the memory that it needs replicated, or with the hardware's memory."""
    asked = measure.asked_of(task, model)
    replicated = baselines(model, asked.state, asked.batch, task.axes)[0]
    score = measure.score_layouts(model, asked, [replicated], task.axes, folder)[0].score
    limits = {"half": score.memory // 2 if score else None, "loose": find_hardware(task.compiler.hardware).memory}
    for limit, memory in limits.items():
        found, made = plan_within(asked, limit, memory)
        if made is not None:
            return made, limit
    raise RuntimeError(f"{task.name} has no plan to train under: {found.reason}")
