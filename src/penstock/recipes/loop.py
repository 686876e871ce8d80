"""The training loop: it talks to the host only at log points, and then of the interval before."""

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

# Steps; fewer in a run of less than 50. The steps of two intervals can be under way at once, each with its batch's
# transform. On several CPU devices that must stay below 32 programs: XLA makes whoever starts more wait, with some
# devices started and others not, and a collective then waits for ever (JAX 0.10).
LOG_EVERY = 5
_VALIDATE_EVERY = 10  # log points


class _Pending(NamedTuple):
    """A log point whose numbers may still be in the making on the devices."""

    step: int
    totals: Totals
    validation: Totals | None
    times: Times


def run(
    classifier: Classifier, batches: Feed, validate: Callable[[State], Totals], steps: int, log: Log, check: Callable[[], None]
) -> None:
    """Train for `steps` batches; each log point goes to `log` when the next one comes, or at the end.

    So the host waits for numbers that are ready, or nearly, and the devices have work while it writes them down.
    `check` is called before each step, and may raise to end the training.
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
            late, pending = pending, None
            if late:
                log.write(_point(late, clock))
            last, validation = step == steps, None
            if last:
                with clock.time("device"):
                    jax.block_until_ready(totals)  # JAX's own, without annotations
            if last or step % (every * _VALIDATE_EVERY) == 0:
                with clock.time("validation"):
                    validation = validate(state)
                    if last:
                        jax.block_until_ready(validation)  # JAX's own, without annotations
            pending = _Pending(step, totals, validation, clock.lap(step))
            totals = classifier.zero
    finally:  # also after Ctrl-C
        if pending:
            log.write(_point(pending, clock))


class _LoopClock(Clock):
    """Splits the wall clock since the last log point into `Times`."""

    def __init__(self, feed: Feed):
        super().__init__()
        self._feed = feed
        self._last = self._readings(0)

    def _readings(self, step: int) -> Times:
        parts = (self.get(name, 0.0) for name in ("dispatch", "device", "validation"))
        return Times(step, time.perf_counter(), self._feed.stats().wait, *parts)

    def lap(self, step: int) -> Times:
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
