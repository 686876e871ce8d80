"""Read batches on the thread of Keras's loop, and find out whether a thread of their own would be worth it.

Functions that read a batch go in; the batches, their statistics and the number of batches that were slow come out.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock._feed.starvation import Meter
from penstock._feed.stats import LaterStats
from penstock._feed.verdict import Caller
from penstock.data.tree import Batch

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


class UnthreadedReader:
    """Reads batches without a feed.

    A batch is slow if it needs more than `_SLOW` seconds of the processor, or takes that long because it waits for a disk or a
    lock. A batch that takes so long only because other programs use the processor is not slow: it would take as long on a thread
    of its own. As these measurements cost as much as a small batch, they begin when a batch has taken more than `_SLOW` seconds,
    and end when one has not.

    Args:
      meter: measures the time that reading takes.

    Attributes:
      slow_in_a_row: number of batches, up to the last, that were slow.
      needs_a_thread: whether batches have been slow for so long that a thread of its own would pay off.
    """

    def __init__(self, meter: Meter) -> None:
        self.slow_in_a_row = 0
        self.needs_a_thread = False
        self._slow_seconds = 0.0  # of the batches that were slow in a row
        self._meter = meter
        self._looks_closer = False

    @property
    def steps(self) -> int:
        """Return the number of batches."""
        return self._meter.steps

    def read(self, read: Callable[[], Batch]) -> Batch:
        """Read a batch, and count it."""
        meter = self._meter
        if self._looks_closer:
            return self._read_closely(read)
        batch = meter.take_inline(read)
        if meter.took > _SLOW:
            self._looks_closer = True
            self.slow_in_a_row, self._slow_seconds = 1, 0.0  # it counts if the next ones prove to be slow, and its time does not
        return batch

    def _read_closely(self, read: Callable[[], Batch]) -> Batch:
        meter = self._meter
        waits, processor = _waits(), time.thread_time()
        batch = meter.take_inline(read)
        self._looks_closer = meter.took > _SLOW
        is_slow = self._looks_closer and (time.thread_time() - processor > _SLOW or _waits() > waits)
        if is_slow:
            self.slow_in_a_row += 1
            self._slow_seconds += meter.took
        else:
            self.slow_in_a_row, self._slow_seconds = 0, 0.0
        self.needs_a_thread = self.slow_in_a_row >= _IN_A_ROW and self._slow_seconds >= _LONG_ENOUGH
        return batch

    def end(self, caller: Caller) -> LaterStats:
        """Return the statistics in the form of a feed's, when no more batches come."""
        self._meter.end(after_step=True)
        return LaterStats(self._meter, {"iterate": self._meter.startup + self._meter.wait}, 1, 0.0, 0, caller)
