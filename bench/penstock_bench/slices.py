"""Let live variants run a block at the same time, in slices: one works for 50 ms while the others are stopped.

Others on a machine take its time away in bursts of a tenth of a second to some seconds. If a burst slows one of two blocks of
half a second, the two differ. Two steps of some seconds differ more. Slices cut each burst into pieces, of which all variants get
some. `docs/measuring.md` has the figures.

At most one seat works at any moment. The harness's thread stops the processes of all seats: it sends SIGSTOP to their group, and
waits until the worker is stopped. Then it continues one at a time. A process gets its request before its first slice. After the
slice, it stops this one before it continues the next one. A seat whose answer has come is settled, and then stopped too. So
between turns all are stopped. The order of the seats is reversed after every slice, so each is before and after each other
equally often.

The cost of slices is a part of the time of each variant. The signals take about 0.1 ms a slice, and caches that another variant
has filled have to be filled again. Stopped time is left out by the worker's clock (`working_clock.py`). A sleep, a time limit and
a device go on while their process is stopped. So a workload that waits for one must not be sliced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from penstock.run_command import nvidia_gpu
from penstock_bench.live_process import EndedError, LiveProcess

_S = TypeVar("_S")


def possible() -> bool:
    """Tell whether variants can be sliced: on Linux, without an accelerator, which works on while its process is stopped."""
    return sys.platform == "linux" and not nvidia_gpu() and not any(Path("/dev").glob("accel*"))


def work_in_slices(
    order: Sequence[_S],
    processes: Mapping[_S, LiveProcess],
    metric: str,
    seconds: float,
    slice_seconds: float,
    answered: Callable[[_S, float], None],
    ended: Callable[[_S, EndedError], None],
) -> None:
    """Let each seat run a block, in slices, and return when all have answered or ended. They are left stopped.

    Args:
      order: the seats, in the order of their first slices.
      processes: by seat; a seat that is no longer in it gets no more slices.
      metric, seconds: of the block.
      slice_seconds: the length of a slice.
      answered: called with a seat and the number that it measured.
      ended: called with a seat whose process cannot go on.
    """
    for seat in order:
        processes[seat].stop()
    new, working = set(order), list(order)
    while working:
        again = []  # those that need another slice
        for seat in working:
            if (process := processes.get(seat)) is None:
                continue
            try:
                if seat in new:
                    new.remove(seat)
                    process.request(metric, seconds)
                process.go_on()
                value = process.answer(slice_seconds)
            except EndedError as error:
                ended(seat, error)
                continue
            if value is None:
                again.append(seat)
            else:
                answered(seat, value)
            process.stop()
        working = again[::-1]
