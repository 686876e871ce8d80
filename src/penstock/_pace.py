"""Measure how long the parts of a pipeline take. This decides which thread finishes an item, and whether threads take turns.

To hand an item to another thread, the interpreter lock changes its owner twice, which takes about 0.1 ms on two busy cores. That
is several times the cost of producing a small batch, or of placing it on a device. `docs/pipeline.md` has the measurements.
"""

from __future__ import annotations

# Seconds. Finishing that takes longer gets a thread of its own.
QUICK = 0.5e-3

# Seconds to produce, finish and use an item. Two threads save at most half of this, and one handover costs as much.
TINY = 0.2e-3


class Pace:
    """The shorter of the last two durations of something, in seconds, so that a single long one changes nothing."""

    def __init__(self) -> None:
        self.seconds = self._last = 0.0

    def add(self, seconds: float) -> None:
        """Add the newest duration, in seconds."""
        self.seconds, self._last = min(seconds, self._last), seconds


class Paces:
    """The paces of producing an item, of finishing it, and of using it."""

    def __init__(self) -> None:
        self.producing, self.finishing, self.using = Pace(), Pace(), Pace()

    def quick_to_finish(self) -> bool:
        """Return whether finishing an item takes less time than handing it to a finisher thread."""
        return self.finishing.seconds <= QUICK

    def tiny(self) -> bool:
        """Return whether an item takes so little time that parallel threads would save no more than one handover costs."""
        return self.producing.seconds + self.finishing.seconds + self.using.seconds <= TINY
