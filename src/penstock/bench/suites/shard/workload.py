"""Tasks as workloads, whose variants run in processes of their own: one plans, and one trains under the plan."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from penstock.bench.model import Measurement, Metric, Target, Variant, VerificationError, Workload
from penstock.bench.suites.shard.case import Case
from penstock.bench.suites.shard.judgement import cells_of
from penstock.bench.suites.shard.task import Task, parse

MODULE = "penstock.bench.suites.shard"
PLANS, TRAINING = "plans", "training"
FOUND = "found"  # among the details of a measurement: a `Case` or a `Training`

_NEEDS = ("flax", "equinox", "optax")
_TIME_LIMIT = 900.0


def workload_of(task: Task) -> Workload:
    """For `penstock bench shard`: what is found is in the details, whatever it is."""
    variants = (Variant(PLANS, _plan, _NEEDS), Variant(TRAINING, _train, _NEEDS))
    return Workload(task.name, task.name, (), None, variants, {"full": task, "quick": task}, time_limit=_TIME_LIMIT)


def find(name: str) -> Workload:
    """A workload of `WORKLOADS`, or that of a task's name."""
    known = [workload for workload in WORKLOADS if workload.name == name]
    return known[0] if known else workload_of(parse(name))


def _plan(task: Task) -> Measurement:
    return Measurement(details={FOUND: asdict(_case(task, _folder()))})


def _train(task: Task) -> Measurement:
    from penstock.bench.suites.shard import losses, measure

    measure.start_devices(task.devices)
    return Measurement(details={FOUND: asdict(losses.train(task, _folder()))})


def _case(task: Task, plans: Path | None) -> Case:
    from penstock.bench.suites.shard import measure

    measure.start_devices(task.devices)
    return measure.measure_case(task, plans)


def _folder() -> Path:
    """Where the process that plans leaves its plans for the one that trains."""
    return Path(os.environ["PENSTOCK_BENCH_CACHE"])


def _among_others(task: Task) -> Workload:
    """For a report of all suites: a small task, whose numbers go through the harness as those of any other suite."""
    return Workload(
        name=f"plan-{task.model}",
        title=f"a plan for {task.model} on a mesh of {task.mesh}, scored by the compiled program",
        metrics=(
            Metric("time", "× the best layout by hand", "lower"),
            Metric("memory", "% of the limit", "lower"),
            Metric("planning", "s", "lower"),
        ),
        baseline=None,
        variants=(Variant("penstock", _measure, _NEEDS, "time and memory are the compiler's, and the same in each round"),),
        sizes={"full": task, "quick": task},
        targets=(Target("penstock", "time", 1.0), Target("penstock", "memory", 100.0), Target("penstock", "planning", 10.0)),
        time_limit=_TIME_LIMIT,
    )


def _measure(task: Task) -> Measurement:
    (cell,) = cells_of(_case(task, None))
    score, limit, planning = cell.plan.score, cell.plan.limit_bytes, cell.plan.planning
    if score is None or limit is None or planning is None:
        raise VerificationError(cell.plan.reason)
    if cell.ratio is None:
        raise VerificationError("there is no layout by hand to compare with")
    return Measurement({"time": cell.ratio, "memory": 100 * score.memory / limit, "planning": planning})


WORKLOADS = tuple(_among_others(Task(model, "2x4", limits=("half",))) for model in ("mlp", "two-tower"))
