"""The metrics of a run, interval by interval: totals on the devices go in, points for the loggers come out one interval late."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from penstock._feed import Feed
from penstock.train.goodput import Meter
from penstock.train.metrics import Interval, Totals, as_json, from_json, read
from penstock.train.point import Logger, Point
from penstock.train.program import Nonfinite

_MOST_SKIPPED = 100  # steps in a row after which a training that skips them ends


class NonfiniteError(ArithmeticError):
    """The error raised if a metric or the state is not finite any more.

    Attributes:
      step: number of the step, from 0, whose metrics were the first that were not finite. If only the state is not finite, the
        number of steps that it had.
      checkpoint: the step of the last good checkpoint; None if there is none.
    """

    def __init__(self, message: str, step: int, checkpoint: int | None):
        super().__init__(message)
        self.step, self.checkpoint = step, checkpoint


class _Pending(NamedTuple):
    """An interval whose metrics the devices may not have computed yet.

    Attributes:
      begin, end: the steps between which it lies.
      totals: its sums, on the devices.
      seconds: time of its steps.
      starved: time for which the devices had no batch.
    """

    begin: int
    end: int
    totals: Totals
    seconds: float
    starved: float


class Intervals:
    """Collects the metrics of intervals.

    Args:
      zero: the totals of no steps, on the devices.
      step: number of steps done.
      steps: number of steps of the run.
      feed: the training batches.
      meter: measures where the time goes.
      loggers: get the points.
      nonfinite: what happens to steps that are not finite.
      last_good: returns how an error names the last good checkpoint, and its step.
      unlogged: what `unlogged` returned when the run was saved; None for a new run.

    Attributes:
      totals: the sums since the last log point. The loop replaces them after each step.
    """

    def __init__(
        self,
        zero: Totals,
        step: int,
        steps: int | None,
        feed: Feed,
        meter: Meter,
        loggers: Sequence[Logger],
        nonfinite: Nonfinite,
        last_good: Callable[[], tuple[str, int | None]],
        unlogged: Mapping[str, Any] | None,
    ):
        self.totals, self._zero = zero, zero
        self.begin = step  # of the current interval
        self._steps, self._feed, self._meter, self._loggers = steps, feed, meter, loggers
        self._nonfinite, self._last_good = nonfinite, last_good
        self._pending: _Pending | None = None
        self._seconds = self._starved = 0.0
        self._run = 0  # steps in a row that were left out
        if unlogged is not None and set(unlogged["current"]["sums"]) == set(zero.sums):
            self._restore(unlogged)

    def _restore(self, saved: Mapping[str, Any]) -> None:
        """Go on with what was not logged yet when the run was saved."""
        shardings = jax.tree.map(lambda total: total.sharding, self._zero)
        self.totals = jax.device_put(from_json(saved["current"]), shardings)
        self.begin, self._run = saved["begin"], saved["run"]
        self._seconds, self._starved = -saved["seconds"], -saved["starved"]
        if (pending := saved["pending"]) is not None:
            self._pending = _Pending(**{**pending, "totals": jax.device_put(from_json(pending["totals"]), shardings)})

    def end(self, step: int) -> None:
        """End an interval, and log the one before.

        Raises:
          NonfiniteError: that one had a metric that is not finite.
        """
        if step == self.begin:
            return
        starved, seconds = self._feed.stats().starved, self._meter.loop
        jax.tree.map(lambda total: total.copy_to_host_async(), self.totals)
        before, self._pending = (
            self._pending,
            _Pending(self.begin, step, self.totals, seconds - self._seconds, starved - self._starved),
        )
        self.totals, self.begin, self._seconds, self._starved = self._zero, step, seconds, starved
        self._meter.reached(step, starved)
        if before:
            self._log(before)

    def flush(self) -> None:
        """Log the interval that has ended last, and wait for its metrics.

        Raises:
          NonfiniteError: a metric is not finite.
        """
        before, self._pending = self._pending, None
        if before:
            self._log(before)

    def unlogged(self) -> Callable[[], dict[str, Any]]:
        """Return a function that returns what was not logged yet, as it is now, as JSON. Another thread may call it.

        It raises NonfiniteError as `end` does.
        """
        pending, begin, totals, run = self._pending, self.begin, self.totals, self._run
        unread = [(pending.begin, pending.totals)] if pending else []
        unread.append((begin, totals))
        seconds, starved = self._meter.loop - self._seconds, self._feed.stats().starved - self._starved

        def fetch() -> dict[str, Any]:
            before = run
            for first, sums in unread:
                interval = read(sums)
                self._check(interval, first, before)
                before = _in_a_row(before, interval)
            return {
                "pending": {**pending._asdict(), "totals": as_json(pending.totals)} if pending else None,
                "current": as_json(totals),
                **{"begin": begin, "run": run, "seconds": seconds, "starved": starved},
            }

        return fetch

    def log(self, point: Point) -> None:
        """Give a point to the loggers, in process 0. All of them get it, also if one has an error: it does not come again."""
        if jax.process_index() != 0:
            return
        errors = []
        for logger in self._loggers:
            try:
                logger(point)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _check(self, interval: Interval, begin: int, run: int) -> None:
        """Raise NonfiniteError if an interval has metrics that are not finite, and that is not to be ignored.

        Args:
          interval: the metrics.
          begin: the number of steps before the interval.
          run: number of steps in a row before it that were left out.
        """
        if self._nonfinite == "ignore" or interval.first_bad is None:
            return
        step = begin + interval.first_bad
        good, checkpoint = self._last_good()
        if self._nonfinite == "stop":
            bad = [name for name, value in interval.metrics.items() if not abs(value) < float("inf")]
            raise NonfiniteError(
                f"{', '.join(bad)} is not finite at step {step:,} (counted from 0): {good}. Look for the cause there, or leave "
                "such steps out with nonfinite='skip'",
                step,
                checkpoint,
            )
        run = _in_a_row(run, interval)
        if run >= _MOST_SKIPPED:
            raise NonfiniteError(
                f"the last {run:,} steps were all left out because they were not finite, since step "
                f"{begin + interval.steps - run:,} (counted from 0): {good}",
                step,
                checkpoint,
            )

    def _log(self, pending: _Pending) -> None:
        interval = read(pending.totals)
        self._check(interval, pending.begin, self._run)
        self._run = _in_a_row(self._run, interval)
        metrics = interval.metrics if self._nonfinite != "skip" else {**interval.metrics, "skipped": float(interval.skipped)}
        self.log(
            Point(
                "train",
                pending.end,
                self._steps,
                metrics,
                speed=interval.steps / pending.seconds if pending.seconds > 0 else None,
                # A feed may take back what it has estimated, so that an interval could have less than none.
                input_wait=min(1.0, max(0.0, pending.starved / pending.seconds)) if pending.seconds > 0 else None,
            )
        )


def _in_a_row(before: int, interval: Interval) -> int:
    """Return the number of steps in a row that were left out, up to the end of an interval."""
    return before + interval.run if interval.run == interval.steps else interval.run
