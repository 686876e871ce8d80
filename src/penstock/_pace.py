"""Estimate how long something takes from its last two durations."""

from __future__ import annotations


class Pace:
    """The shorter of the last two durations of something, in seconds, so that a single long one changes nothing."""

    __slots__ = ("_last", "seconds")

    def __init__(self) -> None:
        self.seconds = self._last = 0.0

    def add(self, seconds: float) -> None:
        """Add the newest duration, in seconds."""
        last = self._last
        self.seconds, self._last = last if last < seconds else seconds, seconds
