"""Make scored workloads of planning tasks: one scores the plans, and one trains under them, each task in its own process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock_bench.model import Measurement, Metric, Remarks, SizeName, Target, Variant, Workload
from penstock_bench.suites.shard import steps
from penstock_bench.suites.shard.comparison import losses_measurement, measurements
from penstock_bench.suites.shard.task import Compiler, Task

_TRAINING, _FIT = "training-", "fit-"
_TIME_LIMIT = 4 * 3600.0  # a compiler takes up to a minute for a program of these sizes

# The ratio to three decimals, as it is printed. A plan that equals the baseline sends the same bytes, except for all-reduces of
# scalars. Their number may differ, which changes the bytes by 30 parts in a million.
_SAME = 1.0005

METRICS = (
    Metric("time", "× best by hand", "lower"),
    Metric("time with latency", "× best by hand", "lower"),
    Metric("memory", "% of limit", "lower"),
    Metric("refusals", "where a baseline fits", "lower"),
    Metric("planning", "s", "lower"),
    Metric("proved gap", "%", "lower"),
    Metric("arguments", "bytes", "zero"),
    Metric("peak memory", "%", "zero"),
    Metric("bytes sent", "%", "zero"),
)
FASTEST, REFUSALS = Target(None, "time", _SAME), Target(None, "refusals", 0.0, over="total")
PREDICTIONS = (
    Target(None, "arguments", 0.0),
    Target(None, "peak memory", 10.0, over="median"),
    Target(None, "peak memory", 30.0),
    Target(None, "bytes sent", 25.0, over="median"),
)
SCORES = (
    "Scores are of the compiled program, per device. Memory: arguments + temporaries + outputs − aliased. Time: FLOPs at the "
    "peak of the hardware and then the bytes of each collective over its link, loops multiplied, except loops of unknown "
    "length, which are named; nothing overlaps. The ratio is to the fastest baseline that keeps the limit. The time with latency "
    "adds the latency of the link for each collective, and its ratio is to the fastest baseline by it. A plan that is "
    "refused, although a baseline keeps the limit, has lost. Seconds to plan are timed once, without compilation; then the plan "
    "is made again, and the compiler decides whether it fits. The proved gap is how much faster a layout may be than the fastest "
    "that was found, by the planner's estimate of time."
)
_LIMITS = (
    "Limits: the hardware's memory (loose), half of what replicated data parallel needs (half), and 1.02 times what the smallest "
    "layout by hand needs (tight)."
)
_CALIBRATED = {
    "zoo": "The model of memory was calibrated on these steps (data parallel and FSDP on 2x4, for each compiler), so that its "
    "errors here say little; the errors of the suites outside and real count.",
    "outside": "The model of memory was not calibrated on these steps.",
    "keras": "The model of memory was not calibrated on these steps.",
}
_TRAINING_METHOD = (
    "Three steps are trained under each task's plan for the smaller limit that has one, and on one device, from the same state "
    "and with the same batches. The difference is the largest relative one between two losses of a step."
)
_FIT_METHOD = (
    "A backbone of Keras Hub is built and trained for three steps by Keras's own `fit`: on one device, and under "
    "AutoShardDistribution with the limit that is tight for its plan, or without a limit if there is none. Parameters: the bytes "
    "that a device holds of all variables of the model, over an eighth of their sum, after the limit was lowered until it asks "
    "for sharded parameters or nothing fits. The largest array: on one device, of all "
    "that live while the model is built, over the largest shard of a variable under the plan. Planning: with tracing, and with "
    "compilations to check the limit. A second fit plans nothing."
)


@dataclass(frozen=True)
class Size:
    """The compiler, and the hardware whose peaks, links and memory count."""

    hardware: str
    compiler: str


def plans_workload(tasks: Sequence[Task], name: str | None = None) -> Workload:
    """Return the workload that scores the plans of these tasks, all of one suite and for one compiler."""
    suite, compiler = tasks[0].suite, tasks[0].compiler
    return Workload(
        name=name or f"{suite}-{compiler.label}",
        title="plans for {hardware} against the best layouts by hand, in the programs of {compiler}",
        metrics=METRICS,
        baseline=None,
        variants=_variants(tasks, _plan),
        sizes=_sizes(compiler),
        targets=(
            FASTEST,
            Target(None, "time", 0.9, over="half"),
            Target(None, "memory", 100.0),
            REFUSALS,
            *PREDICTIONS,
            Target(None, "proved gap", 2.0),
            Target(None, "planning", 10.0),
        ),
        time_limit=_TIME_LIMIT,
        scored=True,
        method=f"{SCORES} {_LIMITS} {_CALIBRATED[suite]}",
    )


def training_workload(tasks: Sequence[Task]) -> Workload:
    """Return the workload that trains under the plans of these tasks, after they were made in the same run."""
    compiler = tasks[0].compiler
    return Workload(
        name=f"{_TRAINING}{tasks[0].suite}-{compiler.label}",
        title="three steps under the plans for {hardware}, judged by {compiler}, against one device",
        metrics=(Metric("difference", "of the loss", "lower"),),
        baseline=None,
        variants=_variants(tasks, _train),
        sizes=_sizes(compiler),
        targets=(Target(None, "difference", 1e-4),),
        time_limit=_TIME_LIMIT,
        scored=True,
        method=_TRAINING_METHOD,
    )


def fit_workload(tasks: Sequence[Task]) -> Workload:
    """Return the workload that fits models of Keras under `AutoShardDistribution`, after they were planned in the same run."""
    compiler = tasks[0].compiler
    return Workload(
        name=f"{_FIT}{tasks[0].suite}-{compiler.label}",
        title="three steps of `fit` under AutoShardDistribution for {hardware}, judged by {compiler}, against one device",
        metrics=(
            Metric("difference", "of the loss", "lower"),
            Metric("parameters", "× 1/8 of their bytes", "lower"),
            Metric("largest array", "× largest shard", "lower"),
            Metric("planning", "s", "lower"),
            Metric("second fit", "s", "lower"),
        ),
        baseline=None,
        variants=_variants(tasks, _fit),
        sizes=_sizes(compiler),
        targets=(
            Target(None, "difference", 1e-4),
            Target(None, "parameters", 1.15),
            Target(None, "largest array", 1.0),
            Target(None, "planning", 10.0),
            Target(None, "second fit", 0.0),
        ),
        time_limit=_TIME_LIMIT,
        scored=True,
        method=_FIT_METHOD,
    )


def find(name: str) -> Workload:
    """Return the workload of this name, with all tasks that there are for its compiler."""
    if name == SMALL.name:
        return SMALL
    prefix = next((each for each in (_TRAINING, _FIT) if name.startswith(each)), "")
    suite, _, label = name.removeprefix(prefix).partition("-")
    compiler = Compiler.of_label(label)
    make = {_TRAINING: training_workload, _FIT: fit_workload}.get(prefix, plans_workload)
    return make(
        [
            Task(model, mesh, compiler, suite, steps.limits(suite, model))
            for model in steps.names(suite)
            for mesh in compiler.meshes
        ]
    )


def folder() -> Path:
    """Return the folder for what later processes use: plans, and figures of the TPU compiler.

    It is the run's, unless the environment gives another, so that later runs use it too.
    """
    found = Path(os.environ["PENSTOCK_BENCH_CACHE"])
    found.mkdir(parents=True, exist_ok=True)
    return found


def _variants(tasks: Sequence[Task], measure: Callable[[Task, Size], Measurement]) -> tuple[Variant, ...]:
    return tuple(
        Variant(
            task.name,
            partial(measure, task),
            steps.needs(task.suite, task.model),
            unsuited=steps.unsuited(task.suite, task.model),
        )
        for task in tasks
    )


def _sizes(compiler: Compiler) -> dict[SizeName, Size]:
    size = Size(compiler.hardware, str(compiler))
    return {"full": size, "quick": size}


def _plan(task: Task, size: Size) -> Measurement:
    from penstock_bench.suites.shard import measure

    measure.start_devices(task.devices)
    return Measurement(parts=measurements(task, *measure.measure_task(task, folder())))


def _fit(task: Task, size: Size) -> Measurement:
    from penstock_bench.suites.shard import measure

    measure.start_devices(task.devices)
    from penstock_bench.suites.shard.hub import fit

    return fit.fit(task, folder())


def _train(task: Task, size: Size) -> Measurement:
    from penstock_bench.suites.shard import measure, training

    measure.start_devices(task.devices)
    losses = training.train(task, folder())
    if losses is None:
        return Measurement(remarks=Remarks(exempt={"difference": "there is no plan to train under"}))
    return losses_measurement(task, losses)


# Two small tasks for a report of all suites, where the zoo would take most of the time.
SMALL = plans_workload([Task(model, "2x4", limits=("half",)) for model in ("mlp", "two-tower")], "small-plans")
