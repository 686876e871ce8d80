"""Make the workloads of real sizes: plans against layouts by hand, by the programs of compilers; and the time to plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from penstock_bench.model import Measurement, Metric, Target, Variant, Workload
from penstock_bench.suites.shard.comparison import measurements
from penstock_bench.suites.shard.task import HARDWARE, Compiler, Task
from penstock_bench.suites.shard.workload import FASTEST, METRICS, PREDICTIONS, REFUSALS, SCORES, Size, folder

REAL, PLANNING = "real", "planning-real"
SMALL_CASE = "llama-small-8"
# The name of a case, and the seconds that its plan may take.
_UNROLLED = {"llama-7b-64": 10.0, "llama-70b-64": 30.0}
_TIME_LIMIT = 12 * 3600.0  # up to ten layouts, for each of which the compiler takes minutes
_NEEDS = ("optax",)
_SIZE = Size(HARDWARE, "the compiler of each")
_METHOD = (
    "Steps of real sizes, with scanned layers that are computed again in the backward pass. The planner searches the mesh too; "
    "the layouts by hand have constraints inside of the step. The limit is the memory of a device. The model of memory was not "
    "calibrated on these steps."
)


def real_workload(cases: Sequence[str]) -> Workload:
    """Return the workload that scores the plans of these cases."""
    tasks = [task_of(name) for name in cases]
    return Workload(
        name=REAL,
        title="plans for real sizes on TPUs and GPUs against the best layouts by hand, in the programs of {compiler}",
        metrics=METRICS,
        baseline=None,
        variants=tuple(Variant(task.model, partial(_score, task), _NEEDS) for task in tasks),
        sizes={"full": _SIZE, "quick": _SIZE},
        targets=(FASTEST, Target(None, "memory", 100.0), REFUSALS, *PREDICTIONS, Target(None, "planning", 10.0)),
        time_limit=_TIME_LIMIT,
        scored=True,
        method=f"{SCORES} {_METHOD}",
    )


def planning_workload() -> Workload:
    """Return the workload that times plans for unrolled layers, with a search of meshes."""
    return Workload(
        name=PLANNING,
        title="seconds to plan for unrolled layers that are computed again, on 64 chips with their meshes searched",
        metrics=(Metric("planning", "s", "lower"),),
        baseline=None,
        variants=tuple(Variant(name, partial(_time, name), _NEEDS) for name in _UNROLLED),
        sizes={"full": _SIZE, "quick": _SIZE},
        targets=tuple(Target(name, "planning", seconds) for name, seconds in _UNROLLED.items()),
        time_limit=_TIME_LIMIT,
        scored=True,
        method="Seconds to plan for real sizes are timed once, without compilation.",
    )


def find_real(name: str) -> Workload | None:
    """Return the workload of this name, with all cases that there are; None if there is none."""
    if name == PLANNING:
        return planning_workload()
    if name != REAL:
        return None
    from penstock_bench.suites.shard import real

    return real_workload([*real.REAL, SMALL_CASE])


def task_of(case: str) -> Task:
    """Return the task of a case: a plan for the memory of its chips, on a mesh that the planner chooses."""
    from penstock_bench.suites.shard import real

    return Task(case, "searched", Compiler.of_label(real.load(case).topology), "real", ("loose",))


def _score(task: Task, size: Size) -> Measurement:
    from penstock_bench.suites.shard import measure

    measure.start_devices(1)
    return Measurement(parts=measurements(task, *measure.measure_case(task, folder())))


def _time(case: str, size: Size) -> Measurement:
    from penstock_bench.suites.shard import measure

    measure.start_devices(1)
    return Measurement({"planning": measure.plan_case(case)})
