"""List the tasks, and make the workload of a task."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from functools import partial

from penstock_bench.model import SLICE_SECONDS, Agreement, Live, Metric, Outputs, Target, Variant, Workload
from penstock_bench.suites.keras.epochs import Epochs
from penstock_bench.suites.keras.task import Geometry, Job, Size, Task

_TEXT = "tokenising documents as they come"
_JPEG = "decoding JPEG files as they come"
_FULL_STEPS = 40
_QUICK_BATCH = 8  # at most, so that workloads that differ only in the batch compile once


def _task(name: str, title: str, make: str, method: str, batch: int, steps: int, **more: object) -> Task:
    return Task(name, title, method, batch, steps, partial(_make, *make.split(".")), **more)  # type: ignore[arg-type]  # fields of Task


def _make(module: str, function: str, size: Size) -> Job:
    """Import a task's module and make its job. Keras is imported here and nowhere before."""
    made: Job = getattr(importlib.import_module(f"penstock_bench.suites.keras.{module}"), function)(size)
    return made


TASKS = (
    *(
        _task(f"bert-fit-b{batch}", f"fit BERT, batch {{batch}}, {_TEXT}", "bert.fit_job", "fit", batch, steps)
        for batch, steps in ((8, 250), (16, 150), (32, 80), (64, 40))
    ),
    _task("bert-predict", f"predict with BERT, batch {{batch}}, {_TEXT}", "bert.predict_job", "predict", 32, 400),
    _task("bert-fit-memmap", "fit BERT, batch {batch}, from a file of 2 GB, shuffled", "bert.memmap_job", "fit", 16, 200),
    _task("gemma-fit", f"fit Gemma, batch {{batch}}, {_TEXT}", "causal.gemma_job", "fit", 8, 70),
    _task("mistral-fit", f"fit Mistral, batch {{batch}}, {_TEXT}", "causal.mistral_job", "fit", 8, 70),
    _task("stable-diffusion-fit", f"fit Stable Diffusion, batch {{batch}}, {_JPEG}", "diffusion.diffusion_job", "fit", 4, 160),
    _task("sam-predict", f"predict with SAM, batch {{batch}}, {_JPEG}", "sam.sam_job", "predict", 4, 50),
    _task(
        "slow-fit",
        "fit from storage that takes 5 ms a batch, with a callback after each step",
        "plain.slow_job",
        "fit",
        224,
        400,
        bound=1 / 1.8,
        each_step=True,
        sleeps=True,
        full=False,
    ),
    _task(
        "slow-fit-no-callback",
        "fit from storage that takes 5 ms a batch",
        "plain.slow_job",
        "fit",
        224,
        400,
        sleeps=True,
        full=False,
    ),
    _task(
        "overhead", "fit a dense layer on small arrays in memory", "plain.arrays_job", "fit", 32, 20_000, bound=1.03, full=False
    ),
)
# A quick run has one batch size, so tasks that differ only in the batch size run once.
QUICK_TASKS = tuple({(task.make.args, task.each_step): task for task in reversed(TASKS)}.values())[::-1]
_FULL = "-full"

# Threaded epochs only change when batches are made, so the results must be the same. A CPU gives the same results twice; a GPU
# may sum in another order.
TOLERANCES = {"loss": 1e-4, "weights": 1e-4}


def workload_of(task: Task, geometry: Geometry) -> Workload:
    """Return the workload of a task in a geometry.

    Raises:
      ValueError: a task that has no such geometry.
    """
    if geometry == "full" and not task.full:
        raise ValueError(f"{task.name} has no full size")
    small = geometry == "small"
    return Workload(
        name=task.name + (_FULL if geometry == "full" else ""),
        title=f"ms a step: {task.title}" + (", full size" if geometry == "full" else ""),
        metrics=(Metric("step", "ms", "lower"),),
        baseline="default",
        variants=(
            _variant("default", task, "Keras alone"),
            _variant("threaded", task, "penstock.keras.enable_threaded_epochs() before the model is made"),
        ),
        sizes={
            "full": Size(geometry, task.batch, task.steps if small else _FULL_STEPS, warm_up=4, skip=8 if small else 2),
            "quick": _quick(task),
        },
        targets=(Target("threaded", "step", task.bound, "default"),),
        time_limit=300.0 if small else 1800.0,
        agreement=Agreement(f"{TASKS[0].name}, 4 steps", _variant("default", task, ""), TOLERANCES, evidence={"predicted": 1e-4}),
        verifies="equal results of the first epoch, the epoch iterator, and the thread that makes the batches",
        slice_seconds=None if task.sleeps else SLICE_SECONDS,
    )


def find(name: str) -> Workload:
    """Return the workload of this name; raise ValueError for another name."""
    for task in TASKS:
        if name == task.name:
            return workload_of(task, "small")
        if name == task.name + _FULL and task.full:
            return workload_of(task, "full")
    raise ValueError(f"no workload is called {name!r}: choose from {', '.join(task.name for task in TASKS)}")


def _quick(task: Task) -> Size:
    return Size("small", min(task.batch, _QUICK_BATCH), steps=4, warm_up=1, skip=0)


def _variant(epochs: Epochs, task: Task, note: str) -> Variant:
    requires = ("keras", "keras_hub", "tokenizers", "PIL")
    return Variant(epochs, requires=requires, note=note, outputs=partial(_outputs, epochs), live=partial(_live, epochs, task))


def _live(epochs: Epochs, task: Task, size: Size) -> AbstractContextManager[Live]:
    from penstock_bench.suites.keras.measure import live

    return live(epochs, task, size)


def _outputs(epochs: Epochs, size: Size) -> Outputs:
    """Compute the outputs of one task for all tasks: an error of threaded epochs would not depend on the model."""
    from penstock_bench.suites.keras.measure import outputs

    return outputs(epochs, TASKS[0], _quick(TASKS[0]))
