"""Measure how long the devices starve for input: the time from the end of all steps given to them until the next batch is there.

The waits of a training loop for its batches go in, seconds come out. JAX dispatches asynchronously, so the loop may wait while
the devices still work, and such a wait costs nothing. A *look* asks the devices whether they have work (`readiness`).

    begin of the wait ──► look: do they work? ──► polls, until they have finished ──► the batch is there
                          no: they starve         from here on they starve

*Which waits are looked at.* Looks take time, so they have a budget (`sampling`). A wait that is looked at from its beginning is a
sample. Waits without a look are estimated by the samples before and after them. A long wait is looked at in any case.

*Work of the loop before the step.* The devices starve on while the loop does something else with the batch first. With the batch
there in time, the loop would have done this during the step before. So a batch counts as late by the time until the loop has
dispatched the next step, but by no more than the wait for it. The loop then replaces results of the step before, whose end tells
the moment (`readiness.Replaced`).

*Late batches.* A batch may be handed over before it is on its devices: its transfer, or the transform there, still runs. A
sample notes this as well, on a thread (`readiness.Watch`), because the loop goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax

from penstock._producers import GetTimeout
from penstock.feed.readiness import Recent, Replaced, Watch, are_pending, jitter, pending_arrays, smallest
from penstock.feed.sampling import Sampling

T = TypeVar("T")

_INTERRUPTION = 50e-6  # seconds that are charged for a wait that a look interrupts, beside the look
_CHECK = 10e-6  # seconds that are charged for a sample without a look
_WATCH = 300e-6  # seconds that are charged for a thread
_COARSE = 20e-3  # the most seconds between two of its polls; on average, the difference of two moments is right all the same
_WATCHES = 4  # threads at once that wait for late batches, as a loop may be many steps ahead of its devices
_MANY = 512  # arrays from which a watch takes the smallest
_INLINE = 20e-6  # a batch that is there takes less than this many seconds; otherwise the loop's own thread may have made it


class Starved(NamedTuple):
    """The result of a `Meter`, in seconds.

    Attributes:
      seconds: the devices starved in all.
      late: the part of it after a batch was handed over.
      blocked: the part of the placement in which the devices had no room for another program.
      guessed: the part of `seconds` that is estimated from so few looks that it proves nothing.
    """

    seconds: float
    late: float
    blocked: float
    guessed: float = 0.0


class _Late:
    """The seconds for which the devices starved after batches were handed over: known for samples, estimated between them."""

    def __init__(self, sampling: Sampling):
        self._sampling = sampling
        self._step, self._seconds = 1, 0.0  # the last sample, and the sum up to it; the first batch does not count

    def add(self, step: int, seconds: float) -> None:
        """Add the sample of a step."""
        between = max(0, step - self._step - 1)
        self._seconds += seconds + between * (self._sampling.late + seconds) / 2
        self._step, self._sampling.late = step, seconds

    def until(self, step: int) -> float:
        """Return the seconds up to a step."""
        return self._seconds + max(0, step - self._step) * self._sampling.late


class Meter:
    """A measurement of the waits of one loop for its batches. It counts from the first batch to the end of the last step.

    Args:
      sampling: the budget, and what earlier feeds of the same loop have shown.
      makes_batches: whether the loop's own thread makes the batches. Then a look comes before that, and not after.
      inner: the measurement of the feed that the batches come from; None if there is none.

    Attributes:
      steps: number of batches that were handed over.
      startup: seconds until the first of them.
      wait: seconds of all other waits.
    """

    def __init__(self, sampling: Sampling | None = None, makes_batches: bool = False, inner: Meter | None = None):
        # Without a budget there is no look. An inner measurement needs none.
        self._sampling = Sampling(0.0, 0.0) if inner else sampling or Sampling()
        self._always_first, self._inner = makes_batches, inner
        self._look_first = makes_batches  # as `get` may make the batch itself, and then there is no moment to look in a wait
        self._inner_before = 0.0  # seconds of starving that `inner` had counted at the first batch,
        self._inner_after: float | None = None  # and at the end
        self._platform: str | None = None
        self.steps = 0
        self.startup = self.wait = 0.0
        self._first_at = self._last_at = self._asked_at = 0.0
        self._checked_at, self._checked_steps = 0.0, 0  # when the budget was checked, and the steps until then
        self._check_at = 0.0  # no wait is a sample before this moment; 0.0 if the next call has something to finish
        self._starved = self._estimated = 0.0  # seconds that the devices starved, and those of them that are estimated
        self._unknown = 0.0  # seconds of waits that nothing is known about, since the last sample,
        self._unknowns = 0  # and their number
        self._sampled: Wait | None = None  # the wait for the batch that is being handed over, if it is a sample
        self._before_step: BeforeStep | None = None  # the last wait that is known, until the loop asks for the next batch
        self._starves = False  # whether the devices starved for the batch that is being handed over
        self._late = _Late(self._sampling)
        self._watches: list[Watch] = []
        self._ended = False

    def take(self, get: Callable[[float | None], T], timeout: float | None) -> T:
        """Call `get`, and measure how long it waits.

        Args:
          get: a function from a timeout in seconds, or None, to a batch. It raises `GetTimeout`.
          timeout: the most seconds to wait; None for no limit.
        """
        begin = time.perf_counter()
        if not self.steps:
            return self._take_first(partial(get, timeout), begin)
        is_sample = begin >= self._check_at and self._asks(begin)
        self._asked_at = begin
        longest = self._sampling.long  # the seconds after which a wait is looked at in any case
        if timeout is not None and timeout <= longest:
            longest = timeout
        try:
            if not is_sample:
                try:
                    item = get(longest)
                except GetTimeout:
                    if longest == timeout:
                        self._add_unknown(time.perf_counter() - begin)
                        raise
                else:
                    self._add_unknown(time.perf_counter() - begin)
                    return item
            return self._take_looking(get, math.inf if timeout is None else begin + timeout, begin, is_sample)
        except GetTimeout:
            raise
        except BaseException:
            self._note_end(begin)
            raise

    def _take_first(self, get: Callable[[], T], begin: float) -> T:
        item = get()
        self._first_at = self._asked_at = self._checked_at = time.perf_counter()
        self.startup = self._first_at - begin
        return item

    def _asks(self, now: float) -> bool:
        """Note that the loop asks for a batch, and return whether this wait is a sample. It is not called before `_check_at`."""
        if self._before_step is not None:
            self._finish_wait(now)
        sampling, steps = self._sampling, self.steps - self._checked_steps
        is_sample = sampling.is_due(now - self._asked_at, self._asked_at - self._checked_at, max(1, steps))
        self._checked_at, self._checked_steps = now, self.steps
        self._check_at = 0.0 if is_sample else now + sampling.seconds_until_due
        return is_sample

    def _note_end(self, begin: float) -> None:
        """Note the end, or an error: the loop had done its last step when it asked for this batch."""
        self._last_at = max(self._last_at, begin)

    def _take_looking(self, get: Callable[[float | None], T], deadline: float, begin: float, is_sample: bool) -> T:
        """Call `get`, with a look at the devices when it does not return at once, or now if the wait is a long one."""
        wait = Wait(begin, self._sampling.busy)
        if not is_sample:
            self._look_or_poll(wait)
        elif self._look_first:
            self._look_or_poll(wait)
            wait.begin = time.perf_counter()
        while True:
            now = time.perf_counter()
            until = min(deadline, wait.until)
            try:
                item = get(None if until == math.inf else max(0.0, until - now))
            except GetTimeout:
                now = time.perf_counter()
                if now >= deadline:
                    self._count(wait, is_sample, now)
                    raise
                self._look_or_poll(wait)
            else:
                self._count(wait, is_sample, time.perf_counter())
                return item

    def _look_or_poll(self, wait: Wait) -> None:
        begin, now = time.thread_time(), time.perf_counter()
        if wait.looked_at is None:
            wait.look(self._sampling.pending(self._platform), now)
        else:
            wait.poll(now)
        self._sampling.spend(time.thread_time() - begin)

    def _count(self, wait: Wait, is_sample: bool, now: float) -> None:
        """Count a wait that has ended."""
        sampling, waited = self._sampling, now - wait.begin
        self._sampled = wait if is_sample else None
        if wait.looked_at is None:
            if waited > _INLINE:
                self._add_unknown(waited)
                self._look_first = True
            else:
                self.wait += waited
            return
        self._check_at = 0.0  # so that the next call calls `_finish_wait`
        wait.poll(now)
        sampling.spend(_INTERRUPTION)
        starved = 0.0 if wait.idle_since is None else now - max(wait.begin, wait.idle_since)
        self._starves = starved > 0
        if is_sample and waited > _INLINE:
            sampling.busy = 2 * waited if wait.idle_since is None else max(0.0, wait.idle_since - wait.begin)
            self._before_step = BeforeStep(now, waited, starved, wait.replaced, True)
        elif is_sample:
            self._look_first = self._always_first
        elif wait.idle_since != wait.looked_at:  # they worked until the look, so all of the wait is known
            self._before_step = BeforeStep(now, waited, starved, wait.replaced, False)
        else:
            before = max(0.0, wait.looked_at - wait.begin)
            self._add_unknown(before)
            waited -= before
        self.wait += waited
        self._starved += starved

    def _finish_wait(self, now: float) -> None:
        """Add the last wait that is known to the samples, now that the loop has started the step with its batch."""
        known, self._before_step = self._before_step, None
        if known is None:
            return
        more = known.starved_on(now)
        self._starved += more
        self._sampling.add(known.waited, known.starved + more)
        if known.is_sample:
            estimate = self._estimate()
            self._starved += estimate
            self._estimated += estimate
            self._unknown, self._unknowns = 0.0, 0

    def _add_unknown(self, waited: float) -> None:
        self.wait += waited
        self._unknown += waited
        self._unknowns += 1

    def _estimate(self) -> float:
        """Return an estimate: for how many of the unknown seconds the devices starved."""
        return self._unknown * self._sampling.share(self._unknown / self._unknowns) if self._unknown else 0.0

    def hand_over(self, batch: Any, placing: float) -> None:
        """Count a batch that is handed over now.

        Args:
          batch: the placed batch; None if it stays on the host.
          placing: seconds that placing it took.
        """
        self._last_at = time.perf_counter()
        self.steps += 1
        if self.steps == 1:
            self._platform = _platform(batch)
            self._inner_before = self._inner.starved(0.0).seconds if self._inner else 0.0
        sampling = self._sampling
        if placing < sampling.quickest:
            sampling.quickest = placing
        if self._starves:
            self._starves = False
            sampling.awaited += 1
            sampling.placing += placing
        if self._sampled is not None:
            wait, self._sampled = self._sampled, None
            if batch is not None:
                self._note_late(batch, wait)

    def _note_late(self, batch: Any, wait: Wait) -> None:
        """Find out how long the devices starve for a batch that is not there yet although it is handed over."""
        sampling, step, now = self._sampling, self.steps, self._last_at
        leaves = jax.tree_util.tree_leaves(batch)
        if not are_pending(leaves):
            sampling.spend(_CHECK)
            self._late.add(step, 0.0)
            return
        self._watches = [watch for watch in self._watches if not watch.ended]
        if len(self._watches) >= _WATCHES:
            return
        begin = time.thread_time()
        work = [] if wait.idle_since else sampling.pending(self._platform, {id(leaf) for leaf in leaves}, _MANY)
        late = [leaf for leaf in leaves if are_pending([leaf])]
        if not late:  # it has come during the look
            self._late.add(step, 0.0)
        else:
            self._watch_late(work, late, step, now)
        sampling.spend(time.thread_time() - begin)

    def _watch_late(self, work: list[jax.Array], late: list[jax.Array], step: int, now: float) -> None:
        """Start a thread that waits for the devices to finish their work, and for the late arrays of the batch of a step."""
        sampling, late_batches = self._sampling, self._late

        def done(times: list[float] | None, seconds: float) -> None:
            sampling.spend(max(0.0, seconds - _WATCH))
            if times is not None:
                idle, there = times
                late_batches.add(step, max(0.0, there - max(idle, now)))

        sampling.spend(_WATCH)
        self._watches.append(Watch([smallest(work), late], done, longest=_COARSE))

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
        now = time.perf_counter()
        if after_step:
            self._last_at = now
        self._finish_wait(now)
        self._inner_after = self._inner.starved(0.0).seconds if self._inner else None
        work = smallest(pending_arrays(self._platform, Recent.arrays()))
        if are_pending(work):
            self._watches.append(Watch([work], self._note_last))

    def _note_last(self, times: list[float] | None, seconds: float) -> None:
        if times is not None:
            self._last_at = max(self._last_at, times[0])

    @property
    def settled(self) -> bool:
        """Tell whether the devices have finished all steps, after `end`."""
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
        """Return how long the devices starved.

        Args:
          place: seconds that placing all batches took.
        """
        if self._inner is not None:
            counted = self._inner.starved(0.0).seconds if self._inner_after is None else self._inner_after
            return Starved(min(counted - self._inner_before, self.seconds), 0.0, 0.0)
        late = min(self._late.until(self.steps), self.seconds)
        blocked = max(0.0, place - self._sampling.own_placing * self.steps)
        estimate = self._estimate()
        guessed = self._estimated + estimate if self._sampling.is_guess else 0.0
        return Starved(min(self._starved + estimate + late, self.seconds), late, blocked, guessed)


def _platform(batch: Any) -> str | None:
    """Return the platform of the devices that hold a batch; None if the host holds it."""
    for leaf in jax.tree_util.tree_leaves(batch):
        if isinstance(leaf, jax.Array):
            return next(iter(leaf.devices())).platform
    return None


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
