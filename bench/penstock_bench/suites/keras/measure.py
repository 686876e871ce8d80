"""Let a variant take its turns, and compute the outputs that are compared."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import numpy as np

from penstock_bench.garbage_collector import freeze_gc
from penstock_bench.model import Live, Measurement, Outputs, VerificationError
from penstock_bench.step_clock import StepClock
from penstock_bench.suites.keras import cache
from penstock_bench.suites.keras.callbacks import AfterEachStep, OneInFlight
from penstock_bench.suites.keras.epochs import Epochs, begin, check_iterator, check_threads, waited
from penstock_bench.suites.keras.keras_setup import configure, jax, keras
from penstock_bench.suites.keras.task import Job, Size, Task


@contextlib.contextmanager
def live(epochs: Epochs, task: Task, size: Size) -> Iterator[Live]:
    """Make the model and its input, and run an epoch of a few steps. A block is an epoch that a callback ends."""
    started = time.perf_counter()
    with cache.at_hand():
        configure()
        threaded = begin(epochs)
        job = task.make(size)
        built = time.perf_counter()
        evidence = run_epoch(task, job, StepClock(math.inf), size.warm_up)
        warm = time.perf_counter()
        check_iterator(epochs)
        freeze_gc()
        details: dict[str, Any] = {}

        def step(seconds: float) -> float:
            if job.batches is not None:
                job.batches.forget()
            clock = StepClock(seconds, skip=size.skip)
            _train_or_predict(task, job, clock)
            clock.finish()
            check_threads(epochs, job)
            details.update(_producing(job), **waited(threaded, job, clock.milliseconds() / 1e3))
            return clock.milliseconds()

        def finish() -> Measurement:
            check_iterator(epochs)
            _check(job)
            return Measurement(
                evidence=evidence,
                details={
                    **evidence,
                    **details,
                    "device": f"{jax.devices()[0].platform}: {jax.devices()[0].device_kind}",
                    "versions": {"keras": keras.__version__},
                    "seconds to build": built - started,
                    "seconds to warm up, with compilation": warm - built,
                },
            )

        yield Live({"step": step}, finish)


def outputs(epochs: Epochs, task: Task, size: Size) -> Outputs:
    """Return the loss of a few steps of training, and the weights after them."""
    with cache.at_hand():
        configure()
        begin(epochs)
        job = task.make(size)
        evidence = run_epoch(task, job, StepClock(math.inf), size.steps)
        weights = {f"weights: {number}": np.asarray(weight) for number, weight in enumerate(job.model.trainable_variables)}
        check_iterator(epochs)
        check_threads(epochs, job)
    return {"loss": np.asarray(evidence["loss"]), **weights}


def run_epoch(task: Task, job: Job, clock: StepClock, steps: int) -> dict[str, float]:
    """Run an epoch of so many steps, and return its results as evidence: they are equal in all variants."""
    results = _train_or_predict(task, job, clock, steps)
    clock.finish()
    if task.method == "fit":
        evidence = {"loss": results.history["loss"][-1], "weights": _norm(job.model.trainable_variables)}
    else:
        evidence = {"predicted": _norm(jax.tree.leaves(results))}
    if not np.isfinite(list(evidence.values())).all():
        raise VerificationError(f"{steps} steps computed {evidence}")
    return evidence


def _train_or_predict(task: Task, job: Job, clock: StepClock, steps: int | None = None) -> Any:
    """Run an epoch of so many steps, or until the clock ends it."""
    callbacks: Any = [AfterEachStep(clock)] if task.each_step else OneInFlight(clock, job.model)
    clock.begin()
    if task.method == "fit":
        return job.model.fit(**job.inputs, steps_per_epoch=steps, callbacks=callbacks, verbose=0)
    return job.model.predict(**job.inputs, steps=steps, callbacks=callbacks, verbose=0)


def _check(job: Job) -> None:
    """Check that what was timed was training, not the propagation of NaNs."""
    if not math.isfinite(_norm(job.model.trainable_variables)):
        raise VerificationError("after the blocks, a weight is not finite")


def _norm(arrays: Any) -> float:
    """Return the Euclidean norm of all arrays together, in float64."""
    return float(np.sqrt(sum(np.square(np.asarray(array, np.float64)).sum() for array in arrays)))


def _producing(job: Job) -> dict[str, float]:
    return {} if job.batches is None else {"milliseconds to make a batch": 1e3 * fmean(s for _, s in job.batches.made)}
