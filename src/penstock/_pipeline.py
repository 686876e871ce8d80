"""Threads that run ahead of a consumer and hand their results over in order, within bounds.

Every thread in penstock belongs to a `PrefetchPipeline`; buffers, errors, waiting and closing are written here and
nowhere else.

What it does
------------
Items are numbered 0, 1, 2, … *Producers* make them, several at a time and in any order. If there is a
`finish`, made items are finished in order, one at a time. The consumer takes them in order.

    producers ──► made (≤ capacity) ──► finish ──► done (≤ done_capacity) ──► get()

Handing an item to another thread costs two changes of the interpreter lock, about 100 µs on two busy
cores: several times what it costs to make a small batch or to place it on a device. So, where finishing
is quick (`_QUICK`), whoever is awake does it: the producer of the next item, or the consumer that finds
nothing done. Where it is slow, or making is, a *finisher* thread finishes, so that making and finishing
overlap, and what was made is finished while the next item takes long. And where working side by side
would save no more than `_TINY` an item, a second thread only costs: producer and consumer take turns, one fills
all the room, the other empties it; or, if the producers *may run inline*, the consumer works *alone*, as far ahead as
`done` holds, while the producer sleeps and only looks, every `_AWAY` seconds, whether the consumer has
gone to do something else, in which case it fills the room. An inline pipeline begins like that, and the producer
takes over as soon as one item takes longer than `_SLOW`.

How it is correct
-----------------
All state lies under one lock, but for `_tiny` and `_patient`, which the consumer alone sets, between two of its
waits, and which others take for a hint.

*Who owns an item.* The producer, then the pipeline, then whoever finishes it, then the pipeline, then the consumer;
each drops its reference when it hands over. No item is written to after it was handed over and no
memory is used for a second item, so there is nothing to race for.

*Who makes.* A number is claimed under the lock, by one thread. The works of several producers may run at once;
that of a single producer never does: the consumer turns `_alone` on only while that producer sleeps, the producer
claims nothing while it is on, and turns it off only while nothing is `_lent` to the consumer.

*Order.* `_next` is the number to be finished next. Only the thread that set `_finishing` finishes. It looks
for the next made item again after clearing the flag, under the lock, and a producer looks after adding its
own: an item that became ready in between is seen by at least one of them.

*Bounds.* A number is claimed for making only while `claimed - next < capacity`, and finished only while
`next - taken < done_capacity`; without `finish`, claimed only while `claimed - taken < capacity`.

*Who may block.* A producer on `_room` or in its work; the finisher on `_finishable` or in `finish`; the
consumer on `_ready`, or in a `finish` that has been quick. Nobody holds the lock while blocked or at work.

*What wakes whom.* The item that the consumer waits for wakes it when it is done. While items are tiny it is
patient: for the first `_QUICK` seconds of a wait, and only then, it is woken when a producer goes to sleep.
Taking an item, or one leaving `made`, wakes who can use the room: a single producer when half of its capacity
is free, while items are tiny when nothing is left. Nobody sleeps on what it missed: a consumer that finds nothing
to take wakes a producer that has room, and the finisher (or starts it, the first time) if there is something to
finish, before it waits.

*The end.* `Exhausted` or an error at number `n` means that nothing from `n` on is handed over; what lies
before `n` comes first. An error is handed over once, `Exhausted` ever after.

*close()* drops all items, wakes everybody, calls `interrupt` (which makes blocked work return, where that is
possible), and waits at most `JOIN_SECONDS` for the threads. A thread inside of a read that nothing can
interrupt ends by itself when the read returns: it hands nothing over, and the last producer runs
`cleanup`. Threads are daemons, so such a read does not hold up interpreter exit either.

*Garbage collection* may call `close()` on any thread at any allocation, even on a worker inside of a
locked region; the lock is re-entrant for that reason, and such a close waits for nobody. It may come between
a worker's look at the state and its sleep, so that the worker misses the call: nobody sleeps longer than `_LOOK`
seconds without a look.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import jax  # noqa: F401 - registers its exit hook first, so that ours, below, runs while JAX still works

from penstock._producers import Exhausted, GetTimeout, Pace, PipelineClosed, Producers

T = TypeVar("T")

JOIN_SECONDS = 0.5

# Seconds. Handing an item to another thread costs about 0.1 ms where both cores are busy: two threads that save
# less than twice that an item only get into each other's way. No part may hold up the others for `_QUICK` or more.
_QUICK = 0.5e-3
_TINY = 0.2e-3

# Seconds for one item, after which a consumer that works alone leaves the next ones to the producer.
_SLOW = 2e-3
_AWAY = 10e-3
_LOOK = 1.0


class PrefetchPipeline(Generic[T]):
    """Makes items 0, 1, 2, … ahead of `get()`, on one thread a producer.

    Args:
      producers: what makes the items.
      capacity: made items that may be in work or waiting, at least 1.
      finish: from (number, made item) to the item that `get` returns; None hands over what was made.
      done_capacity: finished items that may be in work or waiting, at least 1.
      context: entered once on each thread around all of its work.
      consumer_context: asked by each `get`: the context for work on the consumer's thread, None if it may not work.

    Raises:
      ValueError: producers that may run inline, without `finish`.
    """

    def __init__(
        self,
        producers: Producers,
        capacity: int,
        *,
        finish: Callable[[int, Any], T] | None = None,
        done_capacity: int = 1,
        context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
        consumer_context: Callable[[], contextlib.AbstractContextManager[object] | None] = contextlib.nullcontext,
    ):
        if producers.may_run_inline and finish is None:
            raise ValueError("producers with may_run_inline=True need a finish: it is what bounds them")
        self._capacity, self._done_capacity = capacity, done_capacity
        self._finish, self._context, self._consumer_context = finish, context, consumer_context
        self._interrupt, self._cleanup = producers.interrupt, producers.cleanup
        self._lock = threading.RLock()
        self._ready = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._finishable = threading.Condition(self._lock)
        self._made: dict[int, Any] = {}
        self._done: dict[int, T] = {}
        self._claimed = self._next = self._taken = 0
        self._finishing = self._closed = False
        # Seconds for one item, of late: the lesser of the last two, so that a hiccup changes nothing.
        self._make_seconds, self._finish_seconds, self._use_seconds = Pace(), Pace(), Pace()
        self._had_at = 0.0
        self._end: int | None = None
        self._error: BaseException | None = None
        self._sleeping = 0  # producers
        # The work of the only producer, for the consumer to do while the producer sleeps.
        self._inline = producers.works[0] if producers.may_run_inline and len(producers.works) == 1 else None
        self._alone = self._inline is not None  # whether the consumer makes, and the producer leaves it all to that
        self._lent = False  # whether the consumer is making now
        self._tiny = False  # whether working side by side saves less than it costs
        self._helps: contextlib.AbstractContextManager[object] | None = None  # where the consumer's thread may work
        self._patient = False  # whether the consumer waits, for a moment, until a producer sleeps
        self._producers = len(producers.works)
        self._wake_at = (capacity + 1) // 2 if self._producers == 1 else 1
        self._threads: list[threading.Thread] = []
        self._has_finisher = False
        _pipelines.add(self)
        for work in producers.works:
            self._start(partial(self._make, work))

    def _start(self, life: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._run, args=(life,), name=f"penstock-{len(self._threads)}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def get(self, timeout: float | None = None) -> T:
        """Return the next item, waiting for it.

        Raises:
          Exhausted: all items were taken.
          PipelineClosed: the pipeline was closed.
          GetTimeout: nothing came within `timeout` seconds; the next call waits again.
          BaseException: what making or finishing this item raised, once.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._had_at:
            self._use_seconds.add(time.perf_counter() - self._had_at)
        self._patient = self._tiny = self._is_tiny()
        self._helps = self._consumer_context()
        if not (self._tiny and self._helps):
            self._alone = False
        while True:
            with self._lock:
                if self._taken in self._done:
                    item = self._done.pop(self._taken)
                    self._taken += 1
                    self._wake_for_room()
                    break
                alone = self._borrow()
                if not alone and not (self._helps and self._is_mine_to_finish()):
                    self._wait(deadline)
                    continue
            self._work_along(alone)
        if self._tiny and self._helps:
            self._work_ahead()
        self._had_at = time.perf_counter()
        return item

    def _work_ahead(self) -> None:
        """Do in place of the item that was taken another, and one more until `done` is full.

        So a device has time to receive what is taken next, and no call takes longer for it than three do.
        """
        for _ in range(2):
            with self._lock:
                alone = self._borrow()
                if not alone and not self._is_mine_to_finish():
                    return
            self._work_along(alone)

    def _is_tiny(self) -> bool:
        use = self._use_seconds.seconds
        paces = self._make_seconds.seconds, self._finish_seconds.seconds, use
        longest = max(paces)
        return use <= _TINY and longest <= _QUICK and sum(paces) - longest <= _TINY

    def _borrow(self) -> bool:
        """Claim an item for the consumer to make, if it is tiny and the producer sleeps, which then sleeps on."""
        if not (self._tiny and self._helps and self._inline and (self._alone or self._sleeping) and self._has_done_room()):
            return False
        if self._made or self._finishing or self._over(self._claimed):
            return False
        if not self._alone:
            self._alone = True
            self._room.notify()  # to sleep on, but no longer than the consumer stays away
        self._lent = True
        self._claimed += 1
        return True

    def _work_along(self, alone: bool) -> None:
        """On the consumer's thread: make the item that was borrowed, if one was, and finish what there is."""
        assert self._helps is not None
        with self._helps:
            if alone:
                self._make_and_finish(self._claimed - 1)
            else:
                self._finish_ready()

    def _make_and_finish(self, number: int) -> None:
        assert self._inline is not None
        assert self._finish is not None
        begin = time.perf_counter()
        try:
            item = self._inline(number)
            made = time.perf_counter()
            item = self._finish(number, item)
        except BaseException as error:
            with self._lock:
                self._lent = False
                self._stop_at(number, error)
            if isinstance(error, KeyboardInterrupt):  # meant for this thread, now
                raise
            return
        finished = time.perf_counter()
        with self._lock:
            self._lent = False
            self._next += 1
            self._make_seconds.add(made - begin)
            self._finish_seconds.add(finished - made)
            if not self._over(number):
                self._add_done(number, item)
            if finished - begin > _SLOW:
                self._tiny = self._alone = False
                self._room.notify()

    def _wait(self, deadline: float | None) -> None:
        """Wait for a change, unless there is a reason not to."""
        if self._closed:
            raise PipelineClosed
        if self._end is not None and self._taken >= self._end:
            error, self._error = self._error, None
            try:
                raise error or Exhausted
            finally:
                del error  # or its traceback would hold this frame, and this frame it
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise GetTimeout
        if self._can_finish():
            self._wake_finisher()
        if self._sleeping and self._free() > 0:
            self._room.notify()
        if self._patient:
            self._ready.wait(_QUICK if left is None else min(_QUICK, left))
            self._patient = False
        else:
            self._ready.wait(_LOOK if left is None else min(_LOOK, left))

    def close(self, wait: bool = True) -> None:
        """End the pipeline and drop its items; idempotent. See the module's text for what it guarantees."""
        with self._lock:
            first, self._closed = not self._closed, True
            self._made.clear()
            self._done.clear()
            self._error = None
            self._wake_all()
        if first and self._interrupt:
            self._interrupt()
        if wait:
            self.join(time.monotonic() + JOIN_SECONDS)

    def join(self, deadline: float) -> None:
        """Wait for the threads until `deadline` (on `time.monotonic`)."""
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, life: Callable[[], None]) -> None:
        try:
            with self._context():
                life()
        except BaseException as error:  # of the context, or of ours: not to be lost with the thread
            self._stop_at(self._taken, error)

    # The producers.

    def _make(self, work: Callable[[int], Any]) -> None:
        try:
            while (number := self._claim()) is not None:
                self._make_one(work, number)
        finally:
            with self._lock:
                self._producers -= 1
                last = self._producers == 0
            if last and self._cleanup:
                self._clean_up(self._cleanup)

    def _clean_up(self, cleanup: Callable[[], None]) -> None:
        try:
            cleanup()
        except Exception as error:  # nothing that was made is lost for it, nor an earlier error hidden
            warnings.warn(f"closing a source failed: {error!r}", RuntimeWarning, stacklevel=1)

    def _make_one(self, work: Callable[[int], Any], number: int) -> None:
        begin = time.perf_counter()
        try:
            item = work(number)
        except BaseException as error:
            self._stop_at(number, error)
            return
        self._add_made(number, item, time.perf_counter() - begin)

    def _claim(self) -> int | None:
        """The next number to make; waits for room for it."""
        while True:
            with self._lock:
                while (self._free() <= 0 or self._alone) and not self._over(self._claimed) and not self._is_mine_to_finish():
                    if self._patient and self._taken in self._done:
                        self._ready.notify()
                    self._sleep()
                if self._over(self._claimed):
                    return None
                if self._free() > 0 and not self._alone:
                    self._claimed += 1
                    return self._claimed - 1
            self._finish_ready()

    def _sleep(self) -> None:
        alone, taken = self._alone, self._taken
        self._sleeping += 1
        woken = self._room.wait(_AWAY if alone else _LOOK)
        self._sleeping -= 1
        if alone and not woken and not self._lent and self._taken == taken:
            self._alone = False

    def _free(self) -> int:
        return self._capacity - (self._claimed - (self._next if self._finish else self._taken))

    def _is_mine_to_finish(self) -> bool:
        return self._finish_seconds.seconds <= _QUICK and self._can_finish()

    def _add_made(self, number: int, item: Any, seconds: float) -> None:
        with self._lock:
            self._make_seconds.add(seconds)
            if self._over(number):
                return
            if self._finish is None:
                self._add_done(number, item)
                return
            self._made[number] = item
            del item
            if not self._is_mine_to_finish():
                if self._can_finish():
                    self._wake_finisher()
                return
        self._finish_ready()

    # Finishing, by a producer or by the finisher.

    def _has_done_room(self) -> bool:
        return self._next - self._taken < self._done_capacity

    def _can_finish(self) -> bool:
        return self._has_done_room() and self._next in self._made and not self._finishing and not self._over(self._next)

    def _finish_ready(self) -> None:
        """Finish made items as long as there is a next one, room for it, and nobody else at it."""
        assert self._finish is not None
        while True:
            with self._lock:
                if not self._can_finish():
                    return
                number, item = self._next, self._made.pop(self._next)
                self._finishing = True
                self._next += 1
                if self._sleeping and not self._tiny:
                    self._wake_producer()
            begin = time.perf_counter()
            try:
                done = self._finish(number, item)
            except BaseException as error:
                self._stop_at(number, error)  # and nothing is finished after it
                if isinstance(error, KeyboardInterrupt):  # on the main thread, so by the consumer
                    raise
                return
            del item
            with self._lock:
                self._finishing = False
                self._finish_seconds.add(time.perf_counter() - begin)
                if not self._over(number):
                    self._add_done(number, done)
            del done

    def _finish_all(self) -> None:
        while True:
            with self._lock:
                while not self._over(self._next) and not self._can_finish():
                    self._finishable.wait(_LOOK)
                if self._over(self._next):
                    return
            self._finish_ready()

    def _wake_for_room(self) -> None:
        """The consumer took an item: wake whoever can use the room, but nobody who is awake and will see it soon."""
        if self._tiny and (self._done or (self._helps and (self._inline or self._made))):
            return  # the consumer works alone, or uses what is there, and the producers then fill all of the room at once
        if self._finish is None or not self._can_finish():
            self._wake_producer()
        elif self._finish_seconds.seconds > _QUICK:
            self._wake_finisher()
        elif 2 * len(self._done) < self._done_capacity:  # waking somebody takes the consumer's time: not for each item
            self._room.notify() if self._sleeping else self._wake_finisher()

    def _wake_finisher(self) -> None:
        if self._has_finisher:
            self._finishable.notify()
        elif not self._closed:
            self._has_finisher = True
            self._start(self._finish_all)

    def _wake_producer(self) -> None:
        if self._sleeping and self._free() >= self._wake_at:
            self._room.notify()

    # Both.

    def _add_done(self, number: int, item: T) -> None:
        self._done[number] = item
        if number == self._taken and not self._patient:
            self._ready.notify()

    def _over(self, number: int) -> bool:
        """Whether the item of that number will not be handed over."""
        return self._closed or (self._end is not None and number >= self._end)

    def _stop_at(self, number: int, error: BaseException) -> None:
        if isinstance(error, StopIteration):  # from inside of somebody's function; it would end a consumer's loop in silence
            wrapped = RuntimeError(f"StopIteration was raised while making item {number}")
            wrapped.__cause__ = error
            error = wrapped
        with self._lock:
            if self._over(number):
                return
            self._end = number
            self._error = None if isinstance(error, Exhausted) else error
            self._wake_all()

    def _wake_all(self) -> None:
        self._ready.notify_all()
        self._room.notify_all()
        self._finishable.notify_all()


_pipelines: weakref.WeakSet[PrefetchPipeline] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End all threads while the interpreter and the JAX backends still work."""
    deadline = time.monotonic() + JOIN_SECONDS
    pipelines = list(_pipelines)
    for pipeline in pipelines:
        pipeline.close(wait=False)
    for pipeline in pipelines:
        pipeline.join(deadline)
