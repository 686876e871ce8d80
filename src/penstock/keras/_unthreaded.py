"""Read batches on the thread of Keras's loop, and find out whether a thread of their own would be worth it.

Functions that read a batch go in; the batches, their statistics and the number of batches that were slow come out.

Such a batch takes microseconds, so each call of a function on the way is part of the overhead: between two programs that displace
it from the caches, Python takes several times as long as in a loop of its own. So most batches go through `read` alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from penstock.feed.sampling import Sampling
from penstock.feed.starvation import Meter
from penstock.feed.stats import LaterStats
from penstock.feed.verdict import Caller

T = TypeVar("T")

try:
    from resource import RUSAGE_THREAD, getrusage  # Linux
except ImportError:
    _waits = time.perf_counter_ns  # it grows at each call, as if the thread had waited: the system does not tell

else:

    def _waits() -> int:
        """Return how often this thread has waited by itself, for a lock or a disk."""
        usage = getrusage(RUSAGE_THREAD)
        return usage.ru_nvcsw + usage.ru_majflt


# A thread pays off only if a batch takes longer than this: receiving a batch from a thread takes 0.1 ms on a busy machine.
_SLOW = 150e-6  # seconds

# One starts after so many slow batches in a row that took so long together, because other programs may slow all batches down for
# some milliseconds.
_IN_A_ROW = 8
_LONG_ENOUGH = 10e-3  # seconds


class UnthreadedReader(Meter):
    """Reads batches without a feed.

    A batch is slow if it needs more than `_SLOW` seconds of the processor, or takes that long because it waits for a disk or a
    lock. A batch that takes so long only because other programs use the processor is not slow: it would take as long on a thread
    of its own. As these measurements cost as much as a small batch, they begin when a batch has taken more than `_SLOW` seconds,
    and end when one has not.

    Args:
      sampling: as for `Meter`.
      inner: as for `Meter`.

    Attributes:
      slow_in_a_row: number of batches, up to the last, that were slow.
      needs_a_thread: whether batches have been slow for so long that a thread of its own would pay off.
    """

    def __init__(self, sampling: Sampling | None = None, inner: Meter | None = None) -> None:
        super().__init__(sampling, makes_batches=True, inner=inner)
        self.slow_in_a_row = 0
        self.needs_a_thread = False
        self._slow_seconds = 0.0  # of the batches that were slow in a row
        self._looks_closer = False

    def read(self, read: Callable[[], T]) -> T:
        """Read a batch, measure how long it takes, and count it as handed over, on the host."""
        begin = time.perf_counter()
        if begin >= self._check_at or self._looks_closer:
            return self._read_closely(read)
        self._asked_at = begin
        try:
            batch = read()
        except BaseException:
            self._note_end(begin)
            raise
        self._last_at = now = time.perf_counter()
        took = now - begin
        self.wait += took  # from here on, what `take` and `hand_over` do
        self._unknown += took
        self._unknowns += 1
        self.steps += 1
        if took > _SLOW:
            self._note_first_slow()
        return batch

    def _read_closely(self, read: Callable[[], T]) -> T:
        """Read a batch that may be the first, or one before which the devices are looked at, or one that may be slow."""
        looks_closer, before = self._looks_closer, self.startup + self.wait
        waits, processor = (_waits(), time.thread_time()) if looks_closer else (0, 0.0)
        batch = self.take(lambda timeout: read(), None)
        took = self.startup + self.wait - before
        self.hand_over(None, 0.0)
        self._looks_closer = took > _SLOW
        if not looks_closer:
            if took > _SLOW:
                self._note_first_slow()
            return batch
        is_slow = took > _SLOW and (time.thread_time() - processor > _SLOW or _waits() > waits)
        if is_slow:
            self.slow_in_a_row += 1
            self._slow_seconds += took
        else:
            self.slow_in_a_row, self._slow_seconds = 0, 0.0
        self.needs_a_thread = self.slow_in_a_row >= _IN_A_ROW and self._slow_seconds >= _LONG_ENOUGH
        return batch

    def _note_first_slow(self) -> None:
        self._looks_closer = True
        self.slow_in_a_row, self._slow_seconds = 1, 0.0  # it counts if the next ones prove to be slow, and its time does not

    def end_with_stats(self, caller: Caller) -> LaterStats:
        """Return the statistics in the form of a feed's, when no more batches come."""
        self.end(after_step=True)
        return LaterStats(self, {"iterate": self.startup + self.wait}, 1, 0.0, 0, caller)
