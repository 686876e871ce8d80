"""Measure how long the parts of a pipeline take, and decide from this which thread does the work.

The durations of producing, finishing and using items go in. Two decisions come out: which thread finishes an item, and whether
the consumer's thread does all work.

To hand an item to another thread, the interpreter lock changes its owner twice, which takes about 0.1 ms on two busy cores. That
is several times the cost of producing a small batch, or of placing it on a device. `docs/pipeline.md` has the measurements.
"""

from __future__ import annotations

from collections.abc import Generator

# Seconds. Finishing that takes longer gets a thread of its own.
QUICK = 0.5e-3

# Seconds to produce, finish and use an item. Two threads save at most half of this, and one handover costs as much.
TINY = 0.2e-3

# Seconds to produce and finish an item. Up to this, the consumer's thread does it first, and threads are tried later.
SHORT = 2e-3

# Seconds to use an item. A consumer that takes less starts no training step, whose time could be used for anything.
NO_STEP = 50e-6

# Seconds to use an item, and the same as a share of the seconds to produce and finish it. A consumer that takes longer than both
# has other work, during which threads produce.
IDLE, IDLE_SHARE = 0.5e-3, 0.25

# Items until the first trial. Each trial without a change multiplies the number by `_RARER`, up to `_MOST`.
_FIRST, _RARER, _MOST = 64, 8, 16384

# A trial measures both ways in turn, up to so many times. It changes the way if the other one was faster so often.
_ROUNDS, _WINS = 5, 4

# A measurement takes at least so many items, and so many seconds.
_ITEMS, _SECONDS = 8, 4e-3


class Pace:
    """The shorter of the last two durations of something, in seconds, so that a single long one changes nothing."""

    __slots__ = ("_last", "seconds")

    def __init__(self) -> None:
        self.seconds = self._last = 0.0

    def add(self, seconds: float) -> None:
        """Add the newest duration, in seconds."""
        last = self._last
        self.seconds, self._last = last if last < seconds else seconds, seconds


class Paces:
    """The paces of producing an item, of finishing it, and of using it."""

    def __init__(self) -> None:
        self.producing, self.finishing, self.using = Pace(), Pace(), Pace()

    def quick_to_finish(self) -> bool:
        """Return whether finishing an item takes less time than handing it to a finisher thread."""
        return self.finishing.seconds <= QUICK

    def tiny(self) -> bool:
        """Return whether an item takes so little time that parallel threads would save no more than one handover costs."""
        return self.work() + self.using.seconds <= TINY

    def idle(self) -> bool:
        """Return whether the consumer has so little other work that threads may be no faster than the consumer alone."""
        return self.using.seconds <= max(IDLE, IDLE_SHARE * self.work())

    def work(self) -> float:
        """Return the seconds to produce and finish an item."""
        return self.producing.seconds + self.finishing.seconds


class Trials:
    """The decision whether the consumer's thread does all work, from the rate of items both ways.

    Threads overlap the parts of the work, and the consumer's own use of an item. Against that stand the handovers. The sum is
    hard to predict, as it depends on the machine, on its load, and on work that a device does meanwhile. So both ways are
    measured in turn, now and then, and the faster one is kept.

    Args:
      paces: those of the pipeline.
      buffered: items that the pipeline may hold. So many items after a change are not measured.
    """

    def __init__(self, paces: Paces, buffered: int):
        self._paces = paces
        self._schedule = _schedule(paces, buffered)
        next(self._schedule)

    def alone(self, now: float) -> bool:
        """Return whether the consumer's thread does the work for the next item. To be called once for each item.

        Args:
          now: the time on `time.perf_counter`.
        """
        return self._paces.idle() and self._schedule.send(now)


def _schedule(paces: Paces, buffered: int) -> Generator[bool, float, None]:
    """Yield, for each item, whether the consumer works alone; receive the time at which that item is requested."""
    for _ in range(buffered + 1):  # with threads; the first batches may be compiled
        yield False
    alone = paces.using.seconds <= NO_STEP or paces.work() <= SHORT
    interval = _FIRST
    while True:
        for _ in range(interval):
            yield alone
        wins = losses = 0
        while wins < _WINS and losses <= _ROUNDS - _WINS:
            other = yield from _seconds(not alone, buffered)
            same = yield from _seconds(alone, buffered)
            wins, losses = (wins + 1, losses) if other < same else (wins, losses + 1)
        if wins == _WINS:
            alone, interval = not alone, _FIRST
        else:
            interval = min(_RARER * interval, _MOST)


def _seconds(alone: bool, buffered: int) -> Generator[bool, float, float]:
    """Measure the seconds between two items, one way."""
    for _ in range(buffered):
        yield alone
    begin = now = yield alone
    items = 0
    while items < _ITEMS or now - begin < _SECONDS:
        now = yield alone
        items += 1
    return (now - begin) / items
