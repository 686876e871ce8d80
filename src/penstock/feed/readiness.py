"""Find out whether the devices still have work: the arrays that exist and are not computed yet.

JAX returns from a call before its result is computed. Its arrays say whether they are computed (`is_ready`), and
`jax.live_arrays` lists all that exist, so the newest results of the user's steps are among them. This uses the real
data dependences. A marker program behind the user's step would not do on a CPU, where programs run in no order.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, ClassVar

import jax

from penstock._threads import Threads, close_at_exit

_NEWEST = 512  # arrays, of all that exist, that are asked whether they are computed
_PERIOD = 50e-6  # seconds between the first two polls of a thread
_LONGEST = 5e-3  # and the most seconds between two polls
_GROWTH = 0.1  # the next poll comes after this share of the time since the first one

_is_ready, _is_deleted = operator.methodcaller("is_ready"), operator.methodcaller("is_deleted")

_random = random.Random(0)  # not the generator of `random`, whose numbers belong to the user


def jitter(seconds: float) -> float:
    """Return a random time around `seconds`, so that no rhythm of the training loop is in step with ours."""
    return seconds * _random.uniform(0.5, 1.5)


def pending_among(arrays: Iterable[Any]) -> Iterator[jax.Array]:
    """Return an iterator over the arrays that are not computed yet. Deleted and donated ones do not count.

    jaxlib 0.10 crashes if it is asked whether a deleted array is ready. Both questions are asked in C, one after the other, so
    that no other thread can delete an array between them.
    """
    return itertools.filterfalse(_is_ready, itertools.filterfalse(_is_deleted, arrays))


def are_pending(arrays: Iterable[Any]) -> bool:
    """Return whether any of some arrays is not computed yet."""
    on_device = [array for array in arrays if isinstance(array, jax.Array)]
    try:
        return next(pending_among(on_device), None) is not None
    except RuntimeError:  # one was donated in this moment: ask again, without it
        return are_pending(on_device)


def pending_arrays(platform: str | None, without: Set[int] = frozenset(), count: int = _NEWEST) -> list[jax.Array]:
    """Return the newest arrays that programs given to the devices have not computed yet.

    JAX lists the newest arrays first. Those of one program are computed at the same moment, so the newest ones are enough.

    Args:
      platform: the platform of the devices; None for JAX's default.
      without: the `id` of arrays that do not count.
      count: the most arrays to return.
    """
    newest = jax.live_arrays(platform)[:_NEWEST]
    try:
        pending = list(itertools.islice(pending_among(newest), count + len(without)))
    except RuntimeError:  # one was donated in this moment
        return pending_arrays(platform, without, count)
    return [array for array in pending if id(array) not in without][:count]


def smallest(arrays: Iterable[jax.Array], count: int = 16) -> list[jax.Array]:
    """Return the smallest arrays. They are kept alive for a while, and a loss is donated less often than a weight."""
    return sorted(arrays, key=lambda array: array.nbytes)[:count]


class Replaced:
    """The moments at which a loop drops results of its last step. It drops most of them when it has dispatched the next one.

    Args:
      arrays: the results. They are not kept alive.
    """

    def __init__(self, arrays: Iterable[jax.Array]):
        self._times = times = list[float]()
        self._references = [weakref.ref(array, lambda _: times.append(time.perf_counter())) for array in arrays]

    def between(self, begin: float, end: float) -> float:
        """Return the median of these moments between two moments; `begin` if there is none."""
        found = sorted(at for at in self._times if begin <= at <= end)
        return found[(len(found) - 1) // 2] if found else begin


class Watch:
    """A thread that notes when groups of arrays are computed.

    It polls: a thread that blocks inside of JAX could not be ended at interpreter exit. The time of a group is the middle
    between the last poll before and the first poll after, because a thread that waits for the interpreter lock polls late.

    Args:
      groups: the arrays. Each group is dropped as soon as it is computed.
      done: called on the thread with a time (`time.perf_counter`) for each group, 0.0 for a group that was computed at the first
        poll, or with None if that cannot be known, because arrays were deleted before. The second argument is the CPU time
        of the thread in seconds.
      longest: the most seconds between two polls.
    """

    def __init__(
        self, groups: Sequence[list[jax.Array]], done: Callable[[list[float] | None, float], None], longest: float = _LONGEST
    ):
        self._groups, self._done, self._longest = [list(group) for group in groups], done, longest
        self._stop, self._ended = threading.Event(), threading.Event()
        self._threads = Threads(contextlib.nullcontext, "penstock watch")
        close_at_exit(self)
        self._threads.start(self._run, lambda error: self._ended.set())

    @property
    def ended(self) -> bool:
        """Tell whether `done` was called."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until `done` was called."""
        while not self._ended.wait(1.0):  # so that Ctrl-C is noticed
            pass

    def close(self, wait: bool = True) -> None:
        """End the thread at its next poll. The times remain unknown."""
        self._stop.set()

    def join(self, deadline: float) -> None:
        """Wait for the thread until `deadline` (on `time.monotonic`)."""
        self._threads.join(deadline)

    def _run(self) -> None:
        times = self._poll()
        groups, self._groups = self._groups, []
        del groups
        done, self._done = self._done, _ignore
        done(times, time.thread_time())
        self._ended.set()

    def _poll(self) -> list[float] | None:
        times: list[float | None] = [None] * len(self._groups)
        first = before = time.perf_counter()
        while True:
            for number, group in enumerate(self._groups):
                if times[number] is not None:
                    continue
                known = [array for array in group if not array.is_deleted()]
                if group and not known:
                    return None
                if not are_pending(known):
                    now = time.perf_counter()
                    times[number] = 0.0 if before == first else (before + now) / 2
                    self._groups[number] = group = []
                del known
            found = [at for at in times if at is not None]
            if len(found) == len(times):
                return found
            before = time.perf_counter()
            if self._stop.wait(jitter(min(self._longest, _PERIOD + _GROWTH * (before - first)))):
                return None


def _ignore(times: list[float] | None, seconds: float) -> None:
    """Drop the times of a watch that has reported before."""


class Recent:
    """The batches that wait in the buffer of a feed, by weak references. Their arrays are no results of the user's programs.

    Args:
      count: the most batches that wait.
    """

    _all: ClassVar[weakref.WeakValueDictionary[int, Recent]] = weakref.WeakValueDictionary()

    def __init__(self, count: int):
        self._items: deque[weakref.ref[Any]] = deque(maxlen=count)
        self._all[id(self)] = self

    def add(self, item: Any) -> None:
        """Add an object that holds a placed batch as `item.placed.batch`, and that lives while it waits."""
        self._items.append(weakref.ref(item))

    @classmethod
    def arrays(cls) -> set[int]:
        """Return the `id` of all arrays that wait in the buffer of a feed."""
        feeds = [recent for reference in cls._all.valuerefs() if (recent := reference()) is not None]
        items = [item for recent in feeds for reference in list(recent._items) if (item := reference()) is not None]
        return {id(leaf) for item in items for leaf in jax.tree_util.tree_leaves(item.placed.batch)}
