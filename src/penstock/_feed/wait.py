"""One wait of a training loop for a batch, and what was seen of the devices during it.

The moments of a look and of polls go in; the moment from which the devices had no work comes out. `starvation` adds up the waits.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import jax

from penstock._feed.readiness import Replaced, are_pending, jitter

_POLL = 0.1e-3  # seconds between two polls, at least
_GROWTH = 0.2  # the next poll comes after this share of the time since the look, if nothing is known about the steps,
_HALVE = 0.5  # and otherwise after this share of the time from now to the moment at which the devices may have finished


class Wait:
    """A wait for one batch, on the thread of the loop.

    Args:
      begin: its first moment, at which a look is due. All times are those of `time.perf_counter`.
      expected: seconds from the beginning until the devices finish, as far as earlier waits tell; 0.0 if unknown.

    Attributes:
      looked_at: the moment of the look; None if there was none.
      until: the moment of the next look or poll.
      idle_since: the moment from which the devices had no work; None if they have work, or nothing is known.
      pending: results that the devices had not computed at the look.
      replaced: tells when the loop has replaced one of them.
    """

    def __init__(self, begin: float, expected: float):
        self.begin = self.until = begin
        self._expected = expected
        self.looked_at: float | None = None
        self.idle_since: float | None = None
        self.pending: list[jax.Array] = []
        self.replaced: Replaced | None = None
        self._worked_at = begin  # the last moment at which the devices were seen to work

    def look(self, pending: list[jax.Array], now: float) -> None:
        """Note what a look has found."""
        self.looked_at, self.pending = now, pending
        self.replaced = Replaced(pending) if pending else None
        self.idle_since = None if pending else now
        self._worked_at = time.perf_counter()
        self._plan(self._worked_at)

    def poll(self, now: float) -> None:
        """Check whether the devices have finished since the last poll."""
        if are_pending(self.pending):
            self._worked_at = now
        elif self.pending:
            self.pending, self.idle_since = [], (self._worked_at + now) / 2
        self._plan(now)

    def _plan(self, now: float) -> None:
        """Set the moment of the next poll."""
        if not self.pending:
            self.until = math.inf
            return
        elapsed = now - self.begin
        ahead = _HALVE * abs(self._expected - elapsed) if self._expected else _GROWTH * elapsed
        self.until = now + jitter(max(_POLL, ahead))


class BeforeStep(NamedTuple):
    """A wait that is known, whose batch the loop has now.

    Attributes:
      end: the moment at which the batch came.
      waited, starved: seconds of the wait, and those of them in which the devices starved.
      replaced: tells when the loop has started the next step; None if the devices had no work at the beginning of the wait.
      is_sample: whether the waits without a look before it are estimated by it.
    """

    end: float
    waited: float
    starved: float
    replaced: Replaced | None
    is_sample: bool

    def starved_on(self, now: float) -> float:
        """Return for how many seconds after the wait the devices starved on, because the batch came late."""
        if not self.starved or self.replaced is None:
            return 0.0
        return min(self.replaced.between(self.end, now) - self.end, self.waited - self.starved)
