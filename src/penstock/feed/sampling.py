"""Decide which waits of a training loop are looked at, and estimate the others from them.

The costs of looks and their results go in; whether there may be another look, and the share of starving, come out.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Set

import jax

from penstock._pace import Pace
from penstock.feed.readiness import Recent, jitter, pending_arrays

_AT_ONCE = 1e-3  # seconds of looking that are allowed at once,
_LOOKS = 8  # or so many looks, if these take longer: a process with 60,000 arrays needs 15 ms for one
_SHARE = 1.5e-3  # and the share of the time that it may take,
_LONG_STEP, _MORE = 5e-3, 3  # or so many times that share where steps take more seconds: a short run has few such steps
_RECENT = 64  # steps, about, of which the mean counts as the time of a step: one of 32 may take all the time of an execution
_PAUSE = 30  # a step that takes longer than so many mean ones is a pause, and counts as so many
_LONG = 1000  # a wait is looked at when it has lasted for so many times the cost of a look
_CHEAPEST = 100e-6  # seconds of a look and the polls that follow it, at least
_DEAREST = 1e-3  # seconds that are charged at once at the most: a garbage collection may fall into a look,
_USUAL = 2  # or so many times the usual cost of a look, if that is more; the first two looks tell the usual cost
_EVIDENCE = 3  # waits in which the devices were seen to starve, unless they are half of those that were looked at
_ENOUGH = 8  # arrays that a look returns; one that is not computed shows that the devices work


class Sampling:
    """The budget for looks at the devices, and what they have shown so far. Feeds of the same loop, one after another, share one.

    Attributes:
      budget: seconds of looking that may be spent.
      long: a wait of so many seconds is looked at in any case.
      busy: seconds from the beginning of the last sample until the devices had finished.
      late: seconds for which the devices starved after the last sampled batch was handed over.
      awaited, placing: number of batches for which the devices starved, and the seconds that placing these took.
      quickest: the fewest seconds that placing a batch took.
      known, seen: number of waits that were looked at, and of those in which the devices starved.

    Args:
      at_once: the largest budget, and that of the beginning, as long as looks are cheap: see `_LOOKS`.
      share: share of the time that is added to the budget; of long steps, `_MORE` times as much.
    """

    def __init__(self, at_once: float = _AT_ONCE, share: float = _SHARE):
        self.budget = self._at_once = at_once
        self._share = share
        self.busy = self.late = self.placing = 0.0
        self.awaited = self.known = self.seen = 0
        self.quickest = math.inf
        self.long = _LONG * _CHEAPEST
        self._looks, self._made = Pace(), 0
        self._due = 0.0
        self._usual, self._steps = 0.0, 0  # mean seconds of a step
        self._samples: deque[tuple[float, float]] = deque(maxlen=32)  # waits, and their seconds of starving

    def is_due(self, seconds: float, before: float = 0.0, steps: int = 1) -> bool:
        """Return whether the budget allows a sample.

        A pause of the loop (an evaluation, a save, a stop of the process) counts as a few steps. Otherwise many looks in a row
        would follow it, at quick steps.

        Args:
          seconds: the last step took so many.
          before: the steps before it took so many, since the last call.
          steps: number of steps since the last call.
        """
        usual = self._usual
        counted = before + (_PAUSE * usual if seconds > _PAUSE * usual > 0.0 else seconds)
        self.budget = min(self._at_once, self.budget + self._share_now * counted)
        self._steps = min(_RECENT, self._steps + steps)
        self._usual = usual + ((before + seconds) / steps - usual) * min(1.0, steps / self._steps)
        return self.budget > self._due

    @property
    def seconds_until_due(self) -> float:
        """Return the seconds of steps after which the budget allows a sample."""
        missing = self._due - self.budget
        return missing / self._share_now if self._share else math.inf

    @property
    def _share_now(self) -> float:
        return self._share * (_MORE if self._usual > _LONG_STEP else 1)

    def spend(self, seconds: float) -> None:
        """Take the cost of a look, a poll or a thread from the budget."""
        cost = max(self._looks.seconds, _CHEAPEST)
        self.budget -= min(seconds, max(_DEAREST if self._looks.seconds else 0.0, _USUAL * cost))
        self._due, self.long = jitter(cost), _LONG * cost
        if self._share and self._at_once < _LOOKS * cost:
            if self._made <= _LOOKS:  # later on, a look that is dear for once would be followed by many
                self.budget += _LOOKS * cost - self._at_once
            self._at_once = _LOOKS * cost

    def pending(self, platform: str | None, without: Set[int] = frozenset(), count: int = _ENOUGH) -> list[jax.Array]:
        """Look: return results that the devices have not computed yet, without those that wait in the buffer of a feed."""
        begin = time.thread_time()
        found = pending_arrays(platform, Recent.arrays() | without, count)
        self.note_look(time.thread_time() - begin)
        return found

    def note_look(self, seconds: float) -> None:
        """Note what a look has cost, in seconds."""
        self._looks.add(seconds)
        self._made += 1

    def add(self, waited: float, starved: float) -> None:
        """Add a sample: the seconds of a wait, and those of them in which the devices starved."""
        self._samples.append((waited, starved))
        self.known += 1
        self.seen += starved > 0

    def share(self, typical: float) -> float:
        """Return the share of starving, 0 to 1, in the last samples: an estimate for the waits around them.

        As many samples count as make up two such waits. A longer one counts for no more than that, and very short ones, which say
        little about longer waits, count for little.

        Args:
          typical: mean length of the waits, in seconds.
        """
        left, starved = 2 * typical, 0.0
        for sample, lost in reversed(self._samples):
            weight = min(sample, left)
            starved += weight * lost / sample
            left -= weight
            if left <= 0:
                break
        counted = 2 * typical - left
        return starved / counted if counted else 0.0

    @property
    def is_guess(self) -> bool:
        """Tell whether devices were seen to starve so rarely that nothing follows for other waits."""
        return self.seen < _EVIDENCE and self.seen < self.known / 2

    @property
    def own_placing(self) -> float:
        """Return the seconds that placing a batch takes by itself, without waiting for devices that are behind."""
        if self.awaited:
            return self.placing / self.awaited
        return self.quickest if self.quickest < math.inf else 0.0
