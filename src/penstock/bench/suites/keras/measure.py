"""Measure one run of a variant, and compute the outputs that are compared."""

from __future__ import annotations

import time
from statistics import fmean
from typing import Any

import numpy as np

from penstock.bench.garbage_collector import freeze_gc
from penstock.bench.model import Measurement, Outputs, VerificationError
from penstock.bench.step_clock import StepClock, milliseconds
from penstock.bench.suites.keras import cache
from penstock.bench.suites.keras.callbacks import AfterEachStep, OneInFlight, new_clock
from penstock.bench.suites.keras.epochs import Epochs, begin, check_iterator, check_threads, waited
from penstock.bench.suites.keras.keras_setup import configure, jax, keras
from penstock.bench.suites.keras.task import Job, Size, Task

_PARTS = 500


def measure(epochs: Epochs, task: Task, size: Size) -> Measurement:
    """Run an epoch of a few steps, and time another one."""
    started = time.perf_counter()
    with cache.at_hand():
        configure()
        threaded = begin(epochs)
        job = task.make(size)
        built = time.perf_counter()
        warm_up(task, job, size)
        warm = time.perf_counter()
        if job.batches is not None:
            job.batches.forget()
        freeze_gc()
        clock = new_clock()
        evidence = run_epoch(task, job, clock)
        clock.finish()
        steps = milliseconds(clock.ends)
        check_iterator(epochs)
        check_threads(epochs, job, size)
    if len(steps) < size.steps - 2 or not np.isfinite(list(evidence.values())).all():
        raise VerificationError(f"{len(steps)} of {size.steps} steps were timed, and computed {evidence}")
    return Measurement(
        # The mean, not the median: with slow input, most steps may find a batch ready, and a few wait long for the next.
        values={"step": mean_step(steps)},
        steps={"step": _in_parts(steps)},
        evidence=evidence,
        details={
            **evidence,
            **_producing(job),
            **waited(threaded, job, fmean(steps) / 1e3),
            "device": f"{jax.devices()[0].platform}: {jax.devices()[0].device_kind}",
            "versions": {"keras": keras.__version__},
            "seconds to build": built - started,
            "seconds to warm up, with compilation": warm - built,
        },
    )


def outputs(epochs: Epochs, task: Task, size: Size) -> Outputs:
    """Return the loss of a few steps of training, and the weights after them."""
    with cache.at_hand():
        configure()
        begin(epochs)
        job = task.make(size)
        evidence = run_epoch(task, job, new_clock())
        weights = {f"weights: {number}": np.asarray(weight) for number, weight in enumerate(job.model.trainable_variables)}
        check_iterator(epochs)
        check_threads(epochs, job, size)
    return {"loss": np.asarray(evidence["loss"]), **weights}


def warm_up(task: Task, job: Job, size: Size) -> None:
    if task.method == "fit":
        job.model.fit(**job.inputs, steps_per_epoch=size.warm_up, verbose=0)
    else:
        job.model.predict(**job.inputs, steps=size.warm_up, verbose=0)


def run_epoch(task: Task, job: Job, clock: StepClock) -> dict[str, float]:
    """Run one epoch, and return its results as evidence: they are equal in all variants."""
    callbacks: Any = [AfterEachStep(clock)] if task.each_step else OneInFlight(clock, job.model)
    if task.method == "fit":
        history = job.model.fit(**job.inputs, callbacks=callbacks, verbose=0).history
        return {"loss": history["loss"][-1], "weights": _norm(job.model.trainable_variables)}
    return {"predicted": _norm(jax.tree.leaves(job.model.predict(**job.inputs, callbacks=callbacks, verbose=0)))}


def _norm(arrays: Any) -> float:
    """Return the Euclidean norm of all arrays together, in float64."""
    return float(np.sqrt(sum(np.square(np.asarray(array, np.float64)).sum() for array in arrays)))


def mean_step(steps: list[float]) -> float:
    """Return the mean without the first and the last tenth, where buffers are filled and drained."""
    cut = len(steps) // 10
    return fmean(steps[cut : len(steps) - cut])


def _in_parts(steps: list[float]) -> list[float]:
    """Return means over parts of equal length if there are many steps, to keep the report small."""
    return steps if len(steps) <= _PARTS else [fmean(part) for part in np.array_split(steps, _PARTS)]


def _producing(job: Job) -> dict[str, float]:
    return {} if job.batches is None else {"milliseconds to make a batch": 1e3 * fmean(s for _, s in job.batches.made)}
