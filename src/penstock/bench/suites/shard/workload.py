"""Make scored workloads of planning tasks: one scores the plans, and one trains under them, each task in its own process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.bench.model import Measurement, Metric, Remarks, SizeName, Target, Variant, Workload
from penstock.bench.suites.shard.comparison import losses_measurement, plan_measurement
from penstock.bench.suites.shard.task import MESHES, Task

_PLANS, _TRAINING = "plans", "training"
_NEEDS = ("flax", "equinox", "optax")
_TIME_LIMIT = 900.0

# The ratio to three decimals, as it is printed. A plan that equals the baseline sends the same bytes, except for all-reduces of
# scalars. Their number may differ, which changes the bytes by 30 parts in a million.
_SAME = 1.0005

_PLANS_METHOD = (
    "Scores are of the compiled program (XLA:CPU's partitioner, 8 virtual devices), per device. Memory: arguments + temporaries "
    "+ outputs − aliased. Time: FLOPs at the peak of the hardware and then the bytes of each collective over its link, loops "
    "multiplied, but for those of unknown length, which are named; nothing overlaps. The ratio is to the fastest baseline that "
    "keeps the limit: the hardware's memory (loose), or half of what replicated data parallel needs. Seconds to plan are timed "
    "once."
)
_TRAINING_METHOD = (
    "Three steps are trained under each task's plan for the smaller limit that has one, and on one device, from the same state "
    "and with the same batches. The difference is the largest relative one between two losses of a step."
)


@dataclass(frozen=True)
class Size:
    """The hardware whose peaks, links and memory count."""

    hardware: str


def plans_workload(tasks: Sequence[Task], name: str | None = None) -> Workload:
    """Return the workload that scores the plans of these tasks, all for one hardware."""
    return Workload(
        name=name or f"{_PLANS}-{tasks[0].hardware}",
        title="plans for {hardware} against the best layouts by hand",
        metrics=(
            Metric("time", "× best by hand", "lower"),
            Metric("memory", "% of limit", "lower"),
            Metric("planning", "s", "lower"),
            Metric("arguments", "bytes", "zero"),
            Metric("peak memory", "%", "zero"),
            Metric("bytes sent", "%", "zero"),
        ),
        baseline=None,
        variants=tuple(Variant(task.name, partial(_plan, task), _NEEDS) for task in tasks),
        sizes=_sizes(tasks),
        targets=(
            Target(None, "time", _SAME),
            Target(None, "time", 0.9, over="half"),
            Target(None, "memory", 100.0),
            Target(None, "arguments", 0.0),
            Target(None, "peak memory", 20.0, over="median"),
            Target(None, "bytes sent", 25.0, over="median"),
            Target(None, "planning", 10.0),
        ),
        time_limit=_TIME_LIMIT,
        scored=True,
        method=_PLANS_METHOD,
    )


def training_workload(tasks: Sequence[Task]) -> Workload:
    """Return the workload that trains under the plans of these tasks, after they were made in the same run."""
    return Workload(
        name=f"{_TRAINING}-{tasks[0].hardware}",
        title="three steps under the plans for {hardware} against one device",
        metrics=(Metric("difference", "of the loss", "lower"),),
        baseline=None,
        variants=tuple(Variant(task.name, partial(_train, task), _NEEDS) for task in tasks),
        sizes=_sizes(tasks),
        targets=(Target(None, "difference", 1e-4),),
        time_limit=_TIME_LIMIT,
        scored=True,
        method=_TRAINING_METHOD,
    )


def find(name: str) -> Workload:
    """Return the workload of this name, with all tasks that there are for its hardware."""
    if name == SMALL.name:
        return SMALL
    from penstock.bench.suites.shard.zoo import ZOO

    kind, _, hardware = name.partition("-")
    make = {_PLANS: plans_workload, _TRAINING: training_workload}[kind]
    return make([Task(model, mesh, hardware) for model in ZOO for mesh in MESHES])


def _sizes(tasks: Sequence[Task]) -> dict[SizeName, Size]:
    size = Size(tasks[0].hardware)
    return {"full": size, "quick": size}


def _plan(task: Task, size: Size) -> Measurement:
    from penstock.bench.suites.shard import measure

    measure.start_devices(task.devices)
    baselines, plans = measure.measure_task(task, _folder())
    return Measurement(parts={plan.limit: plan_measurement(task, baselines, plan) for plan in plans})


def _train(task: Task, size: Size) -> Measurement:
    from penstock.bench.suites.shard import measure, training

    measure.start_devices(task.devices)
    losses = training.train(task, _folder())
    if losses is None:
        return Measurement(remarks=Remarks(exempt={"difference": "there is no plan to train under"}))
    return losses_measurement(task, losses)


def _folder() -> Path:
    """Return the folder in which the process that plans leaves its plans for the one that trains."""
    return Path(os.environ["PENSTOCK_BENCH_CACHE"])


# Two small tasks for a report of all suites, where the zoo would take most of the time.
SMALL = plans_workload([Task(model, "2x4", limits=("half",)) for model in ("mlp", "two-tower")], "small-plans")
