"""Tell the time in which this process was allowed to work.

A live variant may work in *slices*: the harness stops its processes in the middle of a step, lets others work, and continues it
(`slices.py`). A clock that the variant reads must not count the time in between. The harness keeps the sum of the stopped time in
a page of memory that it shares with the worker. It changes the sum only while the worker is stopped. So a worker that finds the
same sum before and after it has read the system's clock was not stopped meanwhile.

Both read the same clock: on Linux, `time.perf_counter` is CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import mmap
import os
import time

_BYTES = 8  # a number of nanoseconds
_sums: list[memoryview] = []  # one, in a worker that may be stopped
_reads = [0]


def _shared(descriptor: int) -> memoryview:
    """Return the number in shared memory, uint64 [1]. The memory is given back with the view."""
    return memoryview(mmap.mmap(descriptor, _BYTES)).cast("Q")


class StoppedTime:
    """The sum of a worker's stopped time, as its harness keeps it. Linux only.

    Attributes:
      descriptor: of the shared memory, for the worker.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("stopped time")
        os.ftruncate(self.descriptor, _BYTES)
        self._sum = _shared(self.descriptor)

    def add(self, nanoseconds: int) -> None:
        """Add stopped time, while the worker is stopped."""
        self._sum[0] += nanoseconds

    def close(self) -> None:
        """Give the memory back."""
        self._sum.release()
        os.close(self.descriptor)


def count_stops(descriptor: int) -> None:
    """Let `now` leave out the stopped time that is kept in this shared memory."""
    _sums[:] = [_shared(descriptor)]


def now() -> float:
    """Return seconds, from any moment on, without those for which the harness has stopped this process."""
    if not _sums:
        return time.perf_counter()
    (total,) = _sums
    _reads[0] += 1
    while True:
        stopped, seconds = total[0], time.perf_counter()
        if total[0] == stopped:
            return seconds - stopped / 1e9


def reads() -> int | None:
    """Return how often `now` was called; None in a process that is never stopped."""
    return _reads[0] if _sums else None
