"""How long the parts of a pipeline take, and what follows from that: who finishes an item, and whether threads take turns.

Handing an item to another thread costs two changes of the interpreter lock, about 0.1 ms on two busy cores. That is several
times what it costs to make a small batch or to place it on a device. `docs/pipeline.md` has the measurements.
"""

from __future__ import annotations

# Seconds. Finishing that takes longer gets a thread of its own.
QUICK = 0.5e-3

# Seconds to produce, finish and use an item. Two threads save at most half of it, which is what one handover costs.
TINY = 0.2e-3


class Pace:
    """The shorter of the last two durations of something, in seconds, so that a single long one changes nothing."""

    def __init__(self) -> None:
        self.seconds = self._last = 0.0

    def add(self, seconds: float) -> None:
        """Take the newest duration into account."""
        self.seconds, self._last = min(seconds, self._last), seconds


class Paces:
    """The paces of producing an item, of finishing it, and of using it."""

    def __init__(self) -> None:
        self.producing, self.finishing, self.using = Pace(), Pace(), Pace()

    def quick_to_finish(self) -> bool:
        """Return whether finishing takes less than it costs to hand an item to a thread that does it."""
        return self.finishing.seconds <= QUICK

    def tiny(self) -> bool:
        """Return whether an item takes so little that threads side by side would save no more than one handover."""
        return self.producing.seconds + self.finishing.seconds + self.using.seconds <= TINY
