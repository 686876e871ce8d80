"""Run threads that produce items ahead of a consumer, and hand the items over in order and within bounds.

A `PrefetchPipeline` takes `Producers` and an optional `finish`, and returns one finished item from each `get()`. All code that
buffers, waits, orders errors and closes is here. `_threads` starts the threads, and ends them before the interpreter exits.

How it works
------------
Items are numbered 0, 1, 2, … *Producers* produce them, several at a time and in any order. If there is a `finish`,
produced items are finished in order, one at a time. The consumer takes them in order.

    producers ──► produced (≤ capacity) ──► finish ──► done (≤ done_capacity) ──► get()

While items are *tiny* and the consumer does nothing else, handing one to another thread would take as long as making it. So the
consumer makes them *inline*, if the producers allow it, and no thread runs. If making, or what the consumer does in between,
took longer for a few items in a row, the producers start, once and for all.

A *finisher* thread finishes, so that producing and finishing overlap. If finishing is quick (`_QUICK`), the overlap saves less
time than a handover to the finisher costs. Then a thread that is awake finishes: the producer of the next item, or a consumer
that finds no item. The pipeline takes the shorter of the last two durations, so one long finish changes nothing. The finisher
starts when two finishes in a row were slow.

How it is correct
-----------------
All state is read and written under one lock. One thread at a time calls `get`: a feed that several threads share has a lock of
its own for that. While items are made inline, the only other thread is one that closes, so the consumer reads without a lock.

*Ownership.* An item belongs to its producer, then to the pipeline, the thread that finishes it, the pipeline again, and
last the consumer. Each drops its reference when it hands the item over. No item is written to after it was handed over,
and no memory is used for a second item. So no two threads use an item at once.

*Order.* A number is claimed under the lock, by one producer. `_next` is the number to be finished next. Only the thread that set
`_finishing` finishes. After it has cleared the flag, it looks for the next produced item. A producer looks after it has added
its own. Both look under the lock, so at least one of them sees an item that became ready in between.

*Bounds.* A producer claims a number only while `claimed - next < capacity`. An item is finished only while
`next - taken < done_capacity`. Without `finish`, a number is claimed only while `claimed - taken < capacity`.

*Blocking.* A producer blocks on `_room` or in its work, the finisher on `_finishable`, and the consumer on `_ready`. Each of them
may also block in `finish`, but producers and the consumer only in one that has been quick. No thread holds the lock while it
blocks or works.

*Wake-ups.* The consumer is woken by the item that it waits for. When an item is taken, or leaves `produced`, a thread that can
use the free room is woken. A thread that missed a notification does not sleep for ever: before a consumer waits, it wakes a
producer that has room. If there is an item to finish, it also wakes the finisher, or starts it the first time.

*The end.* `Exhausted` or an error at number `n` means that nothing from `n` on is handed over. Items before `n` come
first. An error is raised once; every later `get()` raises `Exhausted`.

*close()* drops all items, wakes all threads, and calls `interrupt`, which makes blocked work return if possible. It waits
at most `JOIN_SECONDS` for the threads. A thread inside a read that cannot be interrupted ends when the read returns. It
hands nothing over, and the last producer runs `cleanup`. Threads are daemons, so such a read does not delay the exit of
the interpreter.

*Garbage collection* may call `close()` on any thread at any allocation, even on a worker that holds the lock. So the
lock is re-entrant, and such a close does not wait for threads. It may come after a worker has read the state and before
it sleeps, so that the worker misses the notification. Therefore every thread reads the state at least every `_LOOK` seconds.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from penstock._threads import JOIN_SECONDS, Threads, close_at_exit


class Producers(NamedTuple):
    """The producers of a pipeline, and how to stop them.

    Attributes:
      works: one callable for each producer, from an item's number to the item. Any free producer may claim a number, so
        every callable must return the same item for it. A callable raises `Exhausted` for a number past the last.
      interrupt: called by `close` to make blocked work return.
      cleanup: called once by the last producer to end.
      inline: whether the only work waits for nothing, such as a disk, so that the consumer's thread may do it. There is then
        nothing to interrupt or to clean up.
    """

    works: Sequence[Callable[[int], Any]]
    interrupt: Callable[[], None] | None = None
    cleanup: Callable[[], None] | None = None
    inline: bool = False


class Exhausted(Exception):  # noqa: N818 - no error
    """The exception that work raises for a number past the last, and that `get` raises when all items were taken."""


class PipelineClosed(Exception):  # noqa: N818 - no error
    """The exception that `get` raises on a closed pipeline."""


class GetTimeout(Exception):  # noqa: N818 - no error
    """The exception that `get` raises when no item came in time. It is not a TimeoutError, which a source may raise itself."""


T = TypeVar("T")

# Seconds. Finishing that takes longer gets a thread of its own. A handover to another thread changes the owner of the interpreter
# lock twice, which takes about 0.1 ms on two busy cores (docs/pipeline.md).
_QUICK = 0.5e-3

# A consumer makes items inline until making one, or what the consumer does between two, took longer for so many items in a row.
# Without inline items, batches of 100 KB that are gathered from an array take 1.6 times as long in a loop that does nothing else.
# Beside a step of 0.2 or 1 ms, a batch would take 1.2 or 1.1 times as long as from threads (docs/pipeline.md).
_TINY, _NOT_TINY_IN_A_ROW = 0.2e-3, 4  # seconds, items
_AHEAD = 2  # items that are made inline before one is taken, so that a device finishes one while the next one is made

_LOOK = 1.0  # the most seconds that a thread sleeps before it reads the state again


class PrefetchPipeline(Generic[T]):
    """A buffer of items 0, 1, 2, … that threads fill ahead of `get()`, one thread for each producer.

    Args:
      capacity: the most items that are being produced, or are produced and waiting, at least 1.
      finish: from (number, produced item) to the item that `get` returns; None hands over the produced item itself.
      done_capacity: the most items that are being finished, or are finished and waiting, at least 1.
      context: entered once on each thread around all of its work.
      consumer_context: called on the consumer's thread; returns the context in which it finishes, None if it must not finish.
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
        self._capacity, self._done_capacity = capacity, done_capacity
        self._finish, self._consumer_context = finish, consumer_context
        self._interrupt, self._cleanup = producers.interrupt, producers.cleanup
        self._lock = threading.RLock()
        self._ready = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._finishable = threading.Condition(self._lock)
        self._produced: dict[int, Any] = {}
        self._done: dict[int, T] = {}
        self._claimed = self._next = self._taken = 0
        self._finishing = self._closed = False
        self._end: int | None = None
        self._error: BaseException | None = None
        self._last_finish = self._usual_finish = 0.0  # seconds: the last duration, and the shorter of the last two
        self._producers = len(producers.works)
        self._threads = Threads(context)
        self._has_finisher = False
        close_at_exit(self)
        self._works: Sequence[Callable[[int], Any]] = producers.works  # until their threads run
        self._not_tiny = 0  # inline items in a row
        self._made_at = math.inf  # the moment when the last inline item was made
        self._inline = producers.works[0] if producers.inline and finish is not None else None
        if self._inline is None:
            self._start_producers()

    def get(self, timeout: float | None = None) -> T:
        """Return the next item; wait for it up to `timeout` seconds, or without limit if `timeout` is None.

        Raises:
          Exhausted: all items were taken.
          PipelineClosed: the pipeline was closed.
          GetTimeout: nothing came within `timeout` seconds; the next call waits again.
          BaseException: what producing or finishing this item raised, once.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._inline is not None:
            self._make_inline(self._inline)
        while True:
            with self._lock:
                if self._taken in self._done:
                    item = self._done.pop(self._taken)
                    self._taken += 1
                    self._wake_for_room()
                    return item
                context = self._consumer_context() if self._is_quick_to_finish() else None
                if context is None:
                    self._wait(deadline)
                    continue
            with context:
                self._finish_ready()

    def _wait(self, deadline: float | None) -> None:
        """Wait for a change; raise if the pipeline is closed or has ended, or if the deadline has passed."""
        if self._closed:
            raise PipelineClosed
        if self._end is not None and self._taken >= self._end:
            error, self._error = self._error, None
            try:
                raise error or Exhausted
            finally:
                del error  # otherwise it and this frame would refer to each other, through its traceback
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise GetTimeout
        if self._can_finish():
            self._wake_finisher()
        self._wake_producer()
        try:
            self._ready.wait(_LOOK if left is None else min(_LOOK, left))
        except KeyboardInterrupt:
            # Ctrl-C between two lines of `Condition.wait` leaves the lock released, which the caller is going to release.
            with contextlib.suppress(RuntimeError):
                self._lock.release()
            self._lock.acquire()
            raise

    def close(self, wait: bool = True) -> None:
        """End the pipeline and drop its items; `wait` for its threads. A second call changes nothing. See the page above."""
        with self._lock:
            first, self._closed = not self._closed, True
            self._produced.clear()
            self._done.clear()
            self._works, self._inline, self._error = (), None, None
            self._wake_all()
        if first and self._interrupt:
            self._interrupt()
        if wait:
            self.join(time.monotonic() + JOIN_SECONDS)

    def join(self, deadline: float) -> None:
        """Wait for the threads until `deadline` (on `time.monotonic`)."""
        self._threads.join(deadline)

    def _fail(self, error: BaseException) -> None:
        """Raise the error of a thread, of its context or of this module, at the next `get`."""
        self._stop_at(self._taken, error)

    # Producing.

    def _start_producers(self) -> None:
        works, self._works, self._inline = self._works, (), None
        for work in works:
            self._threads.start(partial(self._produce, work), self._fail)

    def _make_inline(self, work: Callable[[int], Any]) -> None:
        """Make the item to be taken and the one after it on the consumer's thread, or start the producers."""
        assert self._finish is not None
        context = self._consumer_context()
        if context is None or self._not_tiny >= _NOT_TINY_IN_A_ROW:
            self._start_producers()
            return
        used = time.perf_counter() - self._made_at  # seconds of the consumer between two calls of `get`
        with context:
            while self._next - self._taken < min(_AHEAD, self._done_capacity) and not self._over(self._next):
                number, begin = self._next, time.perf_counter()
                try:
                    item = self._finish(number, work(number))
                except BaseException as error:
                    self._stop_at(number, error)
                    if isinstance(error, KeyboardInterrupt):
                        raise
                    return
                self._made_at = time.perf_counter()
                self._not_tiny = self._not_tiny + 1 if max(used, self._made_at - begin) > _TINY else 0
                with self._lock:
                    self._claimed = self._next = number + 1
                    if not self._over(number):
                        self._add_done(number, item)
                del item

    def _produce(self, work: Callable[[int], Any]) -> None:
        try:
            while (number := self._claim()) is not None:
                self._produce_one(work, number)
        finally:
            with self._lock:
                self._producers -= 1
                last = self._producers == 0
            if last and self._cleanup:
                try:
                    self._cleanup()
                except Exception as error:  # only a warning, which hides no earlier error and loses no item
                    warnings.warn(f"closing a source failed: {error!r}", RuntimeWarning, stacklevel=1)

    def _claim(self) -> int | None:
        """Claim the next number to produce, after waiting for room; return None at the end."""
        while True:
            with self._lock:
                while not self._over(self._claimed) and self._free() <= 0 and not self._is_quick_to_finish():
                    self._room.wait(_LOOK)
                if self._over(self._claimed):
                    return None
                if self._free() > 0:
                    self._claimed += 1
                    return self._claimed - 1
            self._finish_ready()

    def _free(self) -> int:
        return self._capacity - (self._claimed - (self._next if self._finish else self._taken))

    def _produce_one(self, work: Callable[[int], Any], number: int) -> None:
        try:
            item = work(number)
        except BaseException as error:
            self._stop_at(number, error)
            return
        with self._lock:
            if self._over(number):
                return
            if self._finish is None:
                self._add_done(number, item)
                return
            self._produced[number] = item
            del item
            if not self._is_quick_to_finish():
                if self._can_finish():
                    self._wake_finisher()
                return
        self._finish_ready()

    # Finishing, by a producer, the finisher or the consumer.

    def _can_finish(self) -> bool:
        has_room = self._next - self._taken < self._done_capacity
        return has_room and self._next in self._produced and not self._finishing and not self._over(self._next)

    def _is_quick_to_finish(self) -> bool:
        """Return whether an item can be finished, in less time than it takes to hand it to the finisher."""
        return self._can_finish() and self._usual_finish <= _QUICK

    def _finish_ready(self) -> None:
        """Finish produced items while there is a next one, room for it, and no other thread finishes."""
        assert self._finish is not None
        while True:
            with self._lock:
                if not self._can_finish():
                    return
                number, item = self._next, self._produced.pop(self._next)
                self._finishing = True
                self._next += 1
                self._wake_producer()
            begin = time.perf_counter()
            try:
                done = self._finish(number, item)
            except BaseException as error:
                self._stop_at(number, error)  # no later item is finished
                if isinstance(error, KeyboardInterrupt):  # the consumer is on the main thread
                    raise
                return
            del item
            with self._lock:
                self._finishing = False
                last, self._last_finish = self._last_finish, time.perf_counter() - begin
                self._usual_finish = min(last, self._last_finish)
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
        """Wake the thread, if one sleeps, that can use the room of an item that was taken."""
        if self._finish is None or not self._can_finish():
            self._wake_producer()
        elif not self._is_quick_to_finish():
            self._wake_finisher()
        elif 2 * len(self._done) < self._done_capacity:  # not for each item, as a wake-up takes the consumer's time
            self._room.notify()

    def _wake_finisher(self) -> None:
        if self._has_finisher:
            self._finishable.notify()
        elif not self._closed:
            self._has_finisher = True
            self._threads.start(self._finish_all, self._fail)

    def _wake_producer(self) -> None:
        if self._free() > 0:
            self._room.notify()

    # Shared by producing and finishing.

    def _add_done(self, number: int, item: T) -> None:
        self._done[number] = item
        if number == self._taken:
            self._ready.notify()

    def _over(self, number: int) -> bool:
        """Return whether the item of that number will never be handed over."""
        return self._closed or (self._end is not None and number >= self._end)

    def _stop_at(self, number: int, error: BaseException) -> None:
        """Hand over no item from that number on, and raise the error in its place."""
        if isinstance(error, StopIteration):  # it would end the consumer's loop silently
            cause, error = error, RuntimeError(f"StopIteration was raised while making item {number}")
            error.__cause__ = cause
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
