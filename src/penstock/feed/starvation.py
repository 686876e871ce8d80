"""Measure how long the devices starve for input: from the end of all steps given to them until the next batch is there.

JAX dispatches asynchronously, so a loop may wait for its next batch while the devices still work. Such a wait costs nothing. So
there is one *look* at each wait that blocks: it asks the devices whether they have work.

    the wait blocks ──► look: do they work? ──► polls, until they have finished ──► the batch is there
                        no: they starve         from here on they starve

Looks take at most a share of the time (`_INTERVAL_PER_COST`). Short waits without a look count like the short waits with one. A
long wait always gets a look.

*Late batches.* A batch may be handed over before it is on its devices: its transfer, or the transform there, still runs. Every
`_WATCH_INTERVAL` seconds at most, a thread notes this (`Watch`), because the loop goes on.

*How a look works.* `jax.live_arrays` lists all arrays that exist, so the newest results of the user's steps are among them. The
method `is_ready` of an array tells whether it is computed. This uses the real data dependences. A marker program behind the
user's step would not do on a CPU, where programs run in no order.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax

from penstock._pipeline import GetTimeout
from penstock._threads import Threads, close_at_exit
from penstock.data.tree import is_key

T = TypeVar("T")

# Measured on two cores, by the suite `verdict cost` of `penstock bench feed` or in loops of its `known_times`.

# A look asks so many of the newest arrays. Asking one takes 0.9 µs: with 512, looks are ten times rarer at the same cost.
_NEWEST = 32

# The next look comes so many times later as the last one took. With 200 times, the statistics take 12 µs for a batch that is
# ready and 19 µs for one that is awaited, with 600 times 5 µs and 9 µs.
_INTERVAL_PER_COST = 600
_FIRST_INTERVAL = 20e-3  # seconds, before the first look has shown its cost
_MAX_INTERVAL = 5.0  # seconds; a garbage collection of 0.1 s in a look would put off the next one by a minute

# A factor for times, so that no rhythm of the loop is in step with ours. Without it, a loop that fetches every fifth loss counts
# 60 % of its time as starved, of 50 %, and polls in step count 55 %.
_JITTER = 0.5, 1.5

_POLL = 0.1e-3  # seconds between two polls of a wait, at least; shares of steps of 1 ms are right within 4 % (test_verdict)

# Seconds in which `get` returns a batch that is there; otherwise it has made the batch on this thread. Without this, a loop whose
# thread makes batches of 1 ms for steps of 0.3 ms counts 18 % of its time as starved, instead of 39 %.
_READY = 20e-6

# Seconds from one watch to the next. Without watches, a transform of 40 ms on the device beside a step of 15 ms "keeps up".
_WATCH_INTERVAL = 0.2

# Seconds between two polls of a watch: a quarter of the time that it has lasted, between these bounds. Without them, a watch
# would take the interpreter lock all the time at first, and find the end of a long step late.
_WATCH_POLL = 50e-6, 20e-3

_random = random.Random(0)  # not the generator of `random`, whose numbers belong to the user


class Starved(NamedTuple):
    """The result of a `Meter`, in seconds.

    Attributes:
      seconds: for how long the devices starved.
      late: the part of `seconds` after a batch was handed over.
      blocked: the part of the placement in which the devices had no room for another program.
    """

    seconds: float
    late: float
    blocked: float


class Meter:
    """A measurement of the waits of one loop for its batches. It counts from the first batch to the end of the last step.

    Args:
      inner: the meter of the feed that the batches come from, which measures in place of this one; None if there is none.

    Attributes:
      steps: number of batches that were handed over.
      startup: seconds until the first of them.
      wait: seconds of all other waits.
    """

    def __init__(self, inner: Meter | None = None):
        self._inner, self._inner_before = inner, 0.0
        self._inner_after: float | None = None
        self._platform: str | None = None
        self.steps = 0
        self.startup = self.wait = 0.0
        self._first_at = self._last_at = 0.0
        self._next_look = math.inf if inner else 0.0  # a wait that begins from this moment on gets a look at its beginning
        self._is_due = False  # whether the current wait began after `_next_look`
        self._interval = _FIRST_INTERVAL  # seconds between two looks
        self._busy = 0.0  # seconds from the beginning of the last wait with a look until the devices had finished
        self._get_makes = False  # whether `get` makes the batch itself, so that it cannot return at a timeout for a look
        self._starved = 0.0  # seconds that the devices starved in waits with a look
        self._short = self._short_starved = 0.0  # seconds of short waits with a look, and how many of these the devices starved
        self._unknown = 0.0  # seconds of short waits without a look
        self._starves = False  # whether the devices starved in the current wait
        # Batches for which they starved, and the seconds that placing these took. Without them, a source that stalls after
        # every 200 steps on a CPU is called "input-bound on `place`", as 7.1 of 7.3 s of placing waited for room on the device.
        self._awaited, self._placing = 0, 0.0
        self._late, self._late_step, self._last_late = 0.0, 1, 0.0  # seconds up to `_late_step`, and for that step alone
        self._watch_at = 0.0  # the earliest moment of the next watch
        self._watches: list[Watch] = []
        self._ended = False

    def take(self, get: Callable[[float | None], T], timeout: float | None) -> T:
        """Call `get`, and measure how long it waits.

        Args:
          get: a function from a timeout in seconds, or None, to a batch. It raises `GetTimeout`.
          timeout: the most seconds to wait; None for no limit.
        """
        begin = time.perf_counter()
        try:
            if not self.steps:
                item = get(timeout)
                self._first_at = time.perf_counter()
                self.startup = self._first_at - begin
                return item
            self._is_due = is_due = begin >= self._next_look
            if not is_due or not self._get_makes:
                longest = 0.0 if is_due else self._interval
                try:
                    item = get(longest if timeout is None or longest < timeout else timeout)
                except GetTimeout:
                    pass
                else:
                    waited = time.perf_counter() - begin
                    self.wait += waited
                    self._unknown += waited
                    if is_due:
                        self._next_look = begin + self._interval
                        self._get_makes = waited > _READY
                    return item
            return self._take_looking(get, begin, math.inf if timeout is None else begin + timeout)
        except BaseException as error:
            if not isinstance(error, GetTimeout):
                self._note_end(begin)
            raise

    def _note_end(self, begin: float) -> None:
        """Note the end, or an error: the loop had done its last step when it asked for this batch."""
        self._last_at = max(self._last_at, begin)

    def _take_looking(self, get: Callable[[float | None], T], begin: float, deadline: float) -> T:
        """Call `get` for a wait that has begun: look now whether the devices work, and poll until they have finished."""
        looked_at, processor = time.perf_counter(), time.thread_time()
        pending = pending_results(self._platform)
        self._interval = min(_MAX_INTERVAL, _INTERVAL_PER_COST * (time.thread_time() - processor)) * _random.uniform(*_JITTER)
        idle_since = None if pending else looked_at
        worked_at = now = time.perf_counter()
        came = False
        while not came and now < deadline:
            until = deadline
            if pending:  # poll halfway to the moment at which the devices finished in the last wait, or from there
                ahead = max(_POLL, abs(self._busy - (now - begin)) / 2)
                until = min(deadline, now + ahead * _random.uniform(*_JITTER))
            with contextlib.suppress(GetTimeout):
                item = get(None if until == math.inf else until - now)
                came = True
            now = time.perf_counter()
            if pending and are_pending(pending):
                worked_at = now
            elif pending:
                pending, idle_since = [], (worked_at + now) / 2
        self._count(begin, looked_at, idle_since, now)
        if not came:
            raise GetTimeout
        return item

    def _count(self, begin: float, looked_at: float, idle_since: float | None, now: float) -> None:
        """Count a wait with a look that has ended now. The devices had no work since `idle_since`; None if they always had."""
        waited, starved = now - begin, 0.0 if idle_since is None else now - idle_since
        self.wait += waited
        self._starved += starved
        self._starves = starved > 0
        self._next_look = looked_at + self._interval
        if self._is_due:
            self._get_makes = self._get_makes and waited > _READY
            self._busy = waited - starved if starved else 2 * waited
            short = min(waited, self._interval)
            self._short += short
            self._short_starved += starved * short / waited
        elif idle_since == looked_at:  # nothing is known about the time before a look that found no work
            self._unknown += looked_at - begin

    def hand_over(self, batch: Any, placing: float) -> None:
        """Count a batch that is handed over now.

        Args:
          batch: the placed batch; None if it stays on the host.
          placing: seconds that placing it took.
        """
        self._last_at = now = time.perf_counter()
        self.steps += 1
        if self.steps == 1:
            leaves = (leaf for leaf in _leaves(batch) if isinstance(leaf, jax.Array))
            self._platform = next((next(iter(leaf.devices())).platform for leaf in leaves), None)
            self._inner_before = self._inner.starved(0.0).seconds if self._inner else 0.0
        elif self._is_due and now >= self._watch_at and batch is not None:
            self._note_late(batch, now)
        if self._starves:
            self._starves = False
            self._awaited += 1
            self._placing += placing

    def _note_late(self, batch: Any, now: float) -> None:
        """Measure how long the devices starve for a batch that is handed over and not computed yet.

        The steps since the last time count like this one. One watch runs at a time: a loop may be many steps ahead.
        """
        if not self.settled:
            return
        leaves = _leaves(batch)
        if are_pending(leaves):
            work = pending_results(self._platform, {id(leaf) for leaf in leaves}, newest=8 * _NEWEST)
            late = [leaf for leaf in leaves if are_pending([leaf])]
            self._watches = [Watch([work, late], partial(self._add_late, self.steps - self._late_step, now))]
            self._watch_at = now + _WATCH_INTERVAL
        else:
            self._last_late = 0.0
        self._late_step = self.steps

    def _add_late(self, steps: int, handed_over: float, idle: float, there: float) -> None:
        self._last_late = max(0.0, there - max(idle, handed_over))
        self._late += steps * self._last_late

    def end(self, after_step: bool = False) -> None:
        """Note that no more batches come. The time of the steps that the devices have not finished yet still counts.

        Args:
          after_step: whether the loop has just done its last step, so that the time until now counts.
        """
        if self._ended:
            return
        self._ended = True
        if not self.steps:
            return
        if after_step:
            self._last_at = time.perf_counter()
        self._inner_after = self._inner.starved(0.0).seconds if self._inner else None
        if work := pending_results(self._platform):
            self._watches.append(Watch([work], self._note_end))

    @property
    def settled(self) -> bool:
        """Tell whether all watches have ended; after `end`, whether the devices have finished all steps."""
        return all(watch.ended for watch in self._watches)

    def settle(self) -> None:
        """Wait until the devices have finished all steps, if `end` was called."""
        if self._ended:
            for watch in self._watches:
                watch.wait()

    @property
    def seconds(self) -> float:
        """Return the seconds from the first batch to the last one, or to the end of the last step after `end`."""
        return max(0.0, self._last_at - self._first_at)

    def starved(self, place: float) -> Starved:
        """Return how long the devices starved, if placing all batches took `place` seconds."""
        if self._inner is not None:
            counted = self._inner.starved(0.0).seconds if self._inner_after is None else self._inner_after
            return Starved(min(counted - self._inner_before, self.seconds), 0.0, 0.0)
        late = min(self._late + (self.steps - self._late_step) * self._last_late, self.seconds)
        blocked = max(0.0, place - self._placing / self._awaited * self.steps) if self._awaited else 0.0
        estimate = self._unknown * self._short_starved / self._short if self._short else 0.0
        return Starved(min(self._starved + estimate + late, self.seconds), late, blocked)


class Watch:
    """A thread that notes when groups of arrays are computed, one group after another.

    It polls, because a thread that blocks inside JAX cannot be ended at interpreter exit.

    Args:
      groups: the arrays of each group, which are dropped as soon as all of them are computed.
      done: called on the thread with a time (`time.perf_counter`) for each group, 0.0 for a group that was computed at its first
        poll. It is not called if a time cannot be known, because arrays were deleted before.
    """

    def __init__(self, groups: list[list[jax.Array]], done: Callable[..., None]):
        self._stop, self._ended = threading.Event(), threading.Event()
        self._threads = Threads(contextlib.nullcontext, "penstock watch")
        close_at_exit(self)
        self._threads.start(partial(self._run, groups[::-1], done), lambda error: self._ended.set())

    @property
    def ended(self) -> bool:
        """Tell whether all times are known, or cannot be known any more."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until the watch has ended."""
        while not self._ended.wait(1.0):  # so that Ctrl-C is noticed
            pass

    def close(self, wait: bool = True) -> None:
        """End the thread at its next poll. The times remain unknown."""
        self._stop.set()

    def join(self, deadline: float) -> None:
        """Wait for the thread until `deadline` (on `time.monotonic`)."""
        self._threads.join(deadline)

    def _run(self, groups: list[list[jax.Array]], done: Callable[..., None]) -> None:
        times = list[float]()
        while groups and (at := self._poll(groups.pop())) is not None:
            times.append(at)
        if not groups and at is not None:
            done(*times)
        self._ended.set()

    def _poll(self, group: list[jax.Array]) -> float | None:
        first = before = time.perf_counter()
        while True:
            known = [array for array in group if not array.is_deleted()]
            if group and not known:
                return None
            now = time.perf_counter()
            if not are_pending(known):
                return 0.0 if before == first else (before + now) / 2
            del known
            before, (least, most) = now, _WATCH_POLL
            if self._stop.wait(min(most, max(least, (now - first) / 4))):
                return None


# Questions to the devices.

# The batches that were placed last. While they wait in the buffer of a feed, their arrays are no results of the user's programs.
# A `weakref.WeakValueDictionary` took 2 µs of the 32 µs for each batch in the benchmark `overhead`.
_waiting: deque[weakref.ref[Any]] = deque(maxlen=64)


def note_waiting(item: Any) -> None:
    """Note an object that holds a placed batch as `item.placed.batch`, and that lives while the batch waits in a buffer."""
    _waiting.append(weakref.ref(item))


def pending_results(platform: str | None, without: Set[int] = frozenset(), newest: int = _NEWEST) -> list[jax.Array]:
    """Return some of the newest arrays that programs given to the devices have not computed yet.

    JAX lists the newest arrays first. One program computes its results at the same moment, so the newest ones are enough. The
    smallest are returned: they may be kept alive for a while, and a loss is donated less often than a weight.

    Args:
      platform: the platform of the devices; None for JAX's default.
      without: the `id` of arrays that do not count, beside the arrays that wait in the buffers of feeds.
      newest: the number of arrays to ask.
    """
    items = [item for reference in list(_waiting) if (item := reference()) is not None]
    ignored = {id(leaf) for item in items for leaf in _leaves(item.placed.batch)} | without
    arrays = [array for array in jax.live_arrays(platform)[: newest + len(ignored)] if id(array) not in ignored]
    try:
        return sorted(_pending_among(arrays[:newest]), key=lambda array: array.nbytes)[:8]
    except RuntimeError:  # one was donated in this moment
        return pending_results(platform, without, newest)


def are_pending(arrays: Iterable[Any]) -> bool:
    """Return whether any of some arrays is not computed yet."""
    on_device = [array for array in _leaves(list(arrays)) if isinstance(array, jax.Array)]
    try:
        return next(_pending_among(on_device), None) is not None
    except RuntimeError:  # one was donated in this moment: ask again, without it
        return are_pending(on_device)


_is_ready, _is_deleted = operator.methodcaller("is_ready"), operator.methodcaller("is_deleted")


def _pending_among(arrays: Iterable[Any]) -> Iterator[jax.Array]:
    """Return an iterator over the arrays that are not computed yet. Deleted and donated ones do not count.

    jaxlib 0.10 crashes if it is asked whether a deleted array is ready. Both questions are asked in C, one after the other, so
    that no other thread can delete an array between them.
    """
    return itertools.filterfalse(_is_ready, itertools.filterfalse(_is_deleted, arrays))


def _leaves(batch: Any) -> list[Any]:
    """Return the leaves of a batch as `jax.live_arrays` lists them: typed PRNG keys, which have no `is_ready`, as integers."""
    return [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in jax.tree_util.tree_leaves(batch)]
