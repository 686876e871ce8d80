"""The training loop. It reads results from the devices only at log points, and then those of the interval before.

A compiled `Classifier` and a `Feed` go in; log points come out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain, islice
from typing import NamedTuple

import jax

from penstock._clock import Clock
from penstock._feed import Feed
from penstock.recipes.classifier import Classifier, State, Totals
from penstock.recipes.log import Log, Point, Times

# Steps; fewer in a run of less than 50. The steps of two intervals can be in flight at once, each with the transform of its
# batch. With several CPU devices, fewer than 32 programs must be in flight. XLA lets the caller of a further one wait after it
# has started on some devices only, and a collective in it then waits for ever (JAX 0.10).
LOG_EVERY = 5
_VALIDATE_EVERY = 10  # log points


class _Pending(NamedTuple):
    """A log point whose numbers the devices may not have computed yet."""

    step: int
    totals: Totals
    validation: Totals | None
    times: Times


def run(
    classifier: Classifier, batches: Feed, validate: Callable[[State], Totals], steps: int, log: Log, check: Callable[[], None]
) -> None:
    """Train for `steps` batches. Each log point is written to `log` when the next one comes, or at the end.

    So the host waits for numbers that are ready or almost ready, and the devices have work while it writes.

    Args:
      classifier: the compiled functions and the initial state.
      batches: the training data.
      validate: a function from the state to the totals of the validation set.
      steps: number of steps.
      log: gets the log points.
      check: is called before each step, and may raise an error to end the training.
    """
    every = max(1, min(LOG_EVERY, steps // 10))
    state, totals = classifier.state, classifier.zero
    pending: _Pending | None = None
    first = next(batches)
    clock = _LoopClock(batches)
    try:
        for step, batch in enumerate(chain([first], islice(batches, steps - 1)), 1):
            check()
            with clock.time("dispatch"):
                state, totals = classifier.train(state, totals, batch)
            if step % every and step < steps:
                continue
            previous, pending = pending, None
            if previous:
                log.write(_point(previous, clock))
            last, validation = step == steps, None
            if last:
                with clock.time("device"):
                    jax.block_until_ready(totals)
            if last or step % (every * _VALIDATE_EVERY) == 0:
                with clock.time("validation"):
                    validation = validate(state)
                    if last:
                        jax.block_until_ready(validation)
            pending = _Pending(step, totals, validation, clock.lap(step))
            totals = classifier.zero
    finally:  # also after Ctrl-C
        if pending:
            log.write(_point(pending, clock))


class _LoopClock(Clock):
    """A clock that splits the time since the last log point into `Times`."""

    def __init__(self, feed: Feed):
        super().__init__()
        self._feed = feed
        self._last = self._readings(0)

    def _readings(self, step: int) -> Times:
        parts = (self.get(name, 0.0) for name in ("dispatch", "device", "validation"))
        return Times(step, time.perf_counter(), self._feed.stats().wait, *parts)

    def lap(self, step: int) -> Times:
        """Return the times since the last call."""
        now = self._readings(step)
        lap = now.since(self._last)
        self._last = now
        return lap


def _point(pending: _Pending, clock: Clock) -> Point:
    with clock.time("device"):
        totals, validation = jax.device_get((pending.totals, pending.validation))
    return Point(
        step=pending.step,
        loss=float(totals.loss / totals.records),
        accuracy=float(totals.correct / totals.records),
        val_accuracy=float(validation.correct / validation.records) if validation else None,
        times=pending.times,
    )
