"""Time steps by the moments at which they end, with one step always in flight.

The next step is queued before the loop waits for the previous one. A loop that waits after every step would add the time of
queueing to each step of an asynchronous framework. In a real training loop, queueing overlaps with the previous step. A loop
that never waits could not time single steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class StepClock:
    """A clock that says when to stop. A step's time is from the end of the previous step to its own end.

    The first step is not timed: the clock starts at its end. The last step, which is in flight when `more` returns False, is not
    timed either. No step is queued behind it, so its end is seen earlier than others, by the time of queueing and loading.

    Args:
      least, most: the smallest and the largest number of steps to time.
      seconds: with at least `least` steps, stop after this time.
      alone: for steps of a second or more, where the time of queueing is negligible. Each step is waited for before the next is
        queued, and all are timed, from `begin` on.
      now: returns the time in seconds.

    Attributes:
      ends: the times at which steps ended, in seconds; see `milliseconds`.
    """

    def __init__(self, least: int, most: int, seconds: float, alone: bool = False, now: Callable[[], float] = time.perf_counter):
        self._least, self._most, self._seconds, self._alone, self._now = least, most, seconds, alone, now
        self._in_flight: Callable[[], Any] | None = None
        self.ends: list[float] = []

    def begin(self) -> None:
        """Note that the first batch is about to be loaded, and nothing is in flight."""
        if self._alone:
            self.ended()

    def more(self) -> bool:
        """Tell whether another step should be queued."""
        timed = len(self.ends) - 1
        return timed < self._least or (timed < self._most and self.ends[-1] - self.ends[0] < self._seconds)

    def queued(self, wait: Callable[[], Any]) -> None:
        """Note that a step was queued, and wait for the step before it.

        If a step ends before its call returns, as PyTorch's do on a CPU, call `ended` instead. Otherwise its end would be
        recorded when the next step ends.

        Args:
          wait: waits for the end of the step that was queued.
        """
        if self._alone:
            wait()
            self.ended()
            return
        if self._in_flight is not None:
            self._in_flight()
            self.ended()
        self._in_flight = wait

    def ended(self) -> None:
        """Note that a step has just ended; at most the step after it is in flight."""
        self.ends.append(self._now())

    def finish(self) -> None:
        """Wait for the last step, if it is still in flight."""
        if self._in_flight is not None:
            self._in_flight()
            self._in_flight = None


def milliseconds(ends: Sequence[float]) -> list[float]:
    """Return the times between consecutive ends, which are in seconds, in milliseconds."""
    return [float(ms) for ms in np.diff(ends) * 1e3]
