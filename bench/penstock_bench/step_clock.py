"""Time the steps of a block, with one step always in flight.

The next step is queued before the loop waits for the previous one. A loop that waits after every step would add the time of
queueing to each step of an asynchronous framework. In a real training loop, queueing overlaps with the previous step. A loop
that never waits would queue far more work than a block has time for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock_bench import working_clock


class StepClock:
    """A clock that says when a block has had enough steps, and how long they took.

    The time is from the begin of the block to the end of its last step. If steps are skipped, it is between ends that are seen
    with another step in flight: from the end of the last skipped step to the end of the last step but one. A loader delays the
    moment at which an end is seen, and so delays both alike.

    Args:
      seconds: the block ends with the first step that is queued after this time.
      least: the smallest number of steps to time.
      skip: steps at the start that are not timed, because a loader had made their batches before the block.
      alone: for steps that take longer than a block. Each step is waited for before the next is queued, because the time of
        queueing is negligible beside it.
      now: returns the time in seconds.
    """

    def __init__(
        self,
        seconds: float,
        least: int = 1,
        skip: int = 0,
        alone: bool = False,
        now: Callable[[], float] = working_clock.now,
    ):
        self._seconds, self._least, self._skip, self._alone, self._now = seconds, least, skip, alone, now
        self._in_flight: Callable[[], Any] | None = None
        self._queued = self._ended = 0
        self._started: float | None = None
        self._last = 0.0

    @property
    def steps(self) -> int:
        """Return the number of timed steps that have ended."""
        return max(0, self._ended - self._skip)

    def begin(self) -> None:
        """Note that the first batch is about to be loaded, and nothing is in flight."""
        if not self._skip:
            self._started = self._now()

    def more(self) -> bool:
        """Tell whether another step should be queued."""
        enough = self.steps if self._skip and not self._alone else self._queued - self._skip
        if enough < self._least or self._started is None:
            return True
        return self._now() - self._started < self._seconds

    def queued(self, wait: Callable[[], Any]) -> None:
        """Note that a step was queued, and wait for the step before it.

        If a step ends before its call returns, as PyTorch's do on a CPU, call `ended` instead. Otherwise its end would be
        recorded when the next step ends.

        Args:
          wait: waits for the end of the step that was queued.
        """
        self._queued += 1
        if self._alone:
            wait()
            self._note()
            return
        if self._in_flight is not None:
            self._in_flight()
            self._note()
        self._in_flight = wait

    def ended(self) -> None:
        """Note that a step has just ended, and that none is in flight."""
        self._queued += 1
        self._note()

    def finish(self) -> None:
        """Wait for the last step, if it is still in flight."""
        if self._in_flight is not None:
            self._in_flight()
            self._in_flight = None
            if not self._skip:
                self._note()

    def milliseconds(self) -> float:
        """Return the mean time of a step.

        Raises:
          ValueError: no timed step has ended.
        """
        if self._started is None or not self.steps:
            raise ValueError(f"no step was timed, of {self._ended} that ended")
        return (self._last - self._started) / self.steps * 1e3

    def _note(self) -> None:
        self._ended += 1
        self._last = self._now()
        if self._ended == self._skip:
            self._started = self._last
