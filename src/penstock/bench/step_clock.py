"""Time steps by their ends, with one step always in flight.

The next step is queued before the one before it is waited for. A loop that waits after every step would charge an asynchronous
framework for queueing, which a training loop hides behind the step before. A loop that never waits cannot tell steps apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class StepClock:
    """A clock that says when to stop, and how long each step took: from the end of the one before to its own.

    The first step is not timed: its end is where the clock starts. Nor is one that is in flight when the clock wants no more: as
    no other is queued behind it, its end would be seen earlier than those of the others, by what queueing and loading take.

    Args:
      least, most: steps to time.
      seconds: enough, once there are `least`.
      alone: steps take a second or more, of which queueing is next to nothing: each is waited for before the next is queued, and
        all are timed, from `begin` on.
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
        """Wait for the step before the one that was just queued; `wait` waits for this one's end.

        Not for a step that ends before it returns, as PyTorch's do on a CPU: it would be seen to end with the one after it.
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
        """Note that a step has just ended, with no other in flight but the next."""
        self.ends.append(self._now())

    def finish(self) -> None:
        """Wait for the last step, if it is in flight still."""
        if self._in_flight is not None:
            self._in_flight()
            self._in_flight = None


def milliseconds(ends: Sequence[float]) -> list[float]:
    """Return the time between one end and the next."""
    return [float(ms) for ms in np.diff(ends) * 1e3]
