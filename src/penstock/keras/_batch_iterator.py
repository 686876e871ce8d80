"""The iterator over batches that Keras uses inside of an epoch.

It takes `ResumableBatches`, and returns batches placed as Keras needs them. A `Feed` reads them ahead, unless the source says
that a thread would save no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from keras.src import tree

from penstock.data.tree import Batch, describe
from penstock.feed.device_feed import Feed, interrupt, later_stats
from penstock.feed.starvation import Meter
from penstock.feed.stats import LaterStats
from penstock.feed.verdict import Caller
from penstock.keras._execution import ExecutionAdapter, KerasItem, assemble, gather
from penstock.keras._placement import KerasPlacement
from penstock.keras._resumable import ResumableBatches, UnthreadedBatches
from penstock.keras.versions import behaviour, is_partial, partial_batches

_DEVICE_BUFFER = 2
_HOST_BUFFER = 4


class BatchIterator(Iterator[Batch]):
    """An iterator over the batches of one source, which are read ahead only while Keras is in its loop over batches.

    A `Feed` reads them, and `pause` ends its threads. The source keeps the batches that were read and not consumed, and the next
    feed begins with them, so nothing is lost or read twice. A batch counts as consumed when Keras takes it with `next`. `peek`
    does not consume it: Keras peeks before it begins an execution, which it cannot interrupt.

    *Errors.* An error in the place of a batch is raised at that batch, once. Inside of an execution of several steps, Keras would
    lose its state by an error. So the batches before it end the execution first, and `failure` then holds the error.

    *Executions.* Some versions of Keras take all batches of an execution at one `next`. The items that are read, placed and
    peeked are then executions (see `_execution`). Consumed batches are still counted one by one.

    Args:
      source: the batches.
      add_stats: is called with the statistics of each feed when it ends.
      caller: the call that made the batches, for the advice of a verdict.
      limit: number of batches that Keras takes until the end of its epoch, if the source must not be read beyond it; None for no
        limit.
      steps_per_execution: number of batches that Keras takes in one execution.
      epoch_batches: an execution ends at every multiple of this number; None if the source ends by itself.
      first: number of batches that were consumed before, by a run that this one continues.

    Attributes:
      consumed: number of batches that were consumed, with those before.
      taken: number of batches that Keras has taken from this iterator.
      failure: the error that ended the last execution; None if there is none.
    """

    def __init__(
        self,
        source: ResumableBatches,
        add_stats: Callable[[LaterStats], None],
        caller: Caller,
        limit: int | None,
        steps_per_execution: int,
        epoch_batches: int | None = None,
        first: int = 0,
    ):
        self._behaviour = behaviour()
        self._per_item = steps_per_execution if self._behaviour.stacks else 1  # batches that Keras takes at one `next`
        self._source, self._placement, self._add_stats = source, KerasPlacement(self._per_item), add_stats
        self._caller = caller
        self._limit, self._steps, self._epoch_batches = limit, steps_per_execution, epoch_batches
        self._feed: Feed | None = None
        self._consumed = self._begin = first
        self._consumed_of_feed = 0
        self._feed_stop = -1  # number of the first batch that a feed with a limit does not have
        # Whether batches that are read on this thread are also placed on it. Some versions of Keras pass host arrays on.
        self._places = not source.prefetched and (self._behaviour.on_device or self._per_item > 1)
        self._varies = not isinstance(source, UnthreadedBatches)  # whether batches may differ in structure
        self._peeked: KerasItem | None = None  # the next item
        self._structure: Any = None
        self._parts: Any = None
        self._first = ""
        self._in_execution = 0  # batches that Keras took in this execution
        self._meter = self._new_meter()  # of the batches that are read on this thread
        self.failure: BaseException | None = None

    @property
    def in_first_execution(self) -> bool:
        """Tell whether Keras has taken the batches of one execution at the most."""
        return self.taken <= self._steps

    @property
    def consumed(self) -> int:
        return self._consumed

    @property
    def taken(self) -> int:
        return self._consumed - self._begin

    def interrupt(self) -> None:
        """Let a `peek` that waits in another thread raise RuntimeError."""
        feed = self._feed or self._source.prefetched
        if feed is not None:
            interrupt(feed)

    def peek(self) -> bool:
        """Wait for the next batch before Keras begins an execution, without consuming it.

        Returns:
          False if there is no next batch.

        Raises:
          BaseException: the error in the place of the next batch.
        """
        self._in_execution = 0
        if self._peeked is None:
            try:
                self._peeked = self._next_item()
            except StopIteration:
                return False
        return True

    def __next__(self) -> Any:
        """Return the next item for Keras, and count its batches as consumed."""
        ready, self._peeked = self._peeked, None
        if ready is None:
            if self._epoch_batches and self._in_execution and self._consumed % self._epoch_batches == 0:
                raise StopIteration
            try:
                ready = self._next_item()
            except StopIteration:
                raise
            except BaseException as error:
                if self._in_execution == 0:
                    raise
                self.failure = error
                raise StopIteration from None
        item, steps, failure = ready
        self._in_execution += steps
        self._count_consumed(steps)
        if failure is not None:
            self.failure = self._skip_failed_batch(failure)
        return item

    def _next_item(self) -> KerasItem:
        """Return the next item from wherever batches are read now."""
        try:
            ready = self._next_from_feed() if self._source.threaded else self._next_on_this_thread()
        except StopIteration:
            self._end_feed()
            raise
        except Exception as error:
            self._skip_failed_batch(error)
            raise
        if self._varies:
            ready = self._cut_at_other_structure(ready)
        if ready.steps:
            return ready
        assert ready.failure is not None
        failure = self._skip_failed_batch(ready.failure)
        del ready
        try:
            raise failure
        finally:
            del failure  # otherwise its traceback and this frame would refer to each other

    def _skip_failed_batch(self, error: BaseException) -> BaseException:
        """Add the number of the batch to its error, and count it as consumed, so that the next reader does not get it again."""
        error.add_note(f"penstock: in the place of batch {self._consumed} of {self._source.name}")
        self._end_feed()
        self._count_consumed(1)
        return error

    def _count_consumed(self, batches: int) -> None:
        self._consumed += batches
        for _ in range(batches):
            self._source.consume()

    def _next_on_this_thread(self) -> KerasItem:
        """Read the next item on this thread."""
        if self._per_item == 1:
            return KerasItem(self._read(0))
        # The batches are on their devices, and are stacked there.
        return assemble(gather(self._read, range(self._per_item)), self._per_item, lambda batch, stacked: batch)

    def _read(self, ahead: int) -> Batch:
        batch = self._meter.take(lambda timeout: self._source.read(ahead), None)
        self._meter.hand_over(None, 0.0)
        return _put(batch) if self._places else batch

    def _next_from_feed(self) -> KerasItem:
        """Take the next item from a feed, and start one if there is none."""
        if self._feed is None:
            self._feed = self._start_feed()
        try:
            item = next(self._feed)
        except StopIteration:
            if self._consumed != self._feed_stop:
                raise
            # Keras takes more batches than it announced, as in a train function of the user's own.
            self._end_feed()
            self._feed = self._start_feed()
            item = next(self._feed)
        ready = item if self._per_item > 1 else KerasItem(item)
        self._consumed_of_feed += ready.steps
        return ready

    def _start_feed(self) -> Feed:
        self._placement.take_settings()
        self._feed_stop = -1 if self._limit is None else self._consumed + self._limit
        batch_adapter = self._source.batch_adapter(self._limit)
        host_buffer, device_buffer = max(_HOST_BUFFER, self._steps), _DEVICE_BUFFER
        if self._per_item > 1:
            batch_adapter = ExecutionAdapter(batch_adapter, self._per_item, self._epoch_batches, self._consumed)
            # One execution waits while another runs: at least as many batches as without stacking.
            host_buffer, device_buffer = -(-host_buffer // self._per_item), 1
        return Feed(
            batch_adapter,
            self._placement,
            host_buffer=host_buffer,
            device_buffer=device_buffer,
            timeout=None,
            strict=False,
            first=self._consumed,
            caller=self._caller,
        )

    def pause(self) -> None:
        """End the threads and wait for them, when Keras has left its loop. Threads that are slow to start are kept.

        The next `next()` starts new threads.
        """
        if not self._source.slow_to_start:
            self.close()

    def stop_for_inner_loop(self) -> None:
        """End the threads because another loop begins inside of this one, which may use the same data.

        Batches that were not consumed stay with the source, for the inner loop to read.
        """
        self._end_feed()
        self._peeked = None

    def close(self) -> None:
        """End the threads, and wait for them as `Feed.close` does."""
        self.stop_for_inner_loop()
        meter = self._meter
        if meter.steps:
            meter.end(after_step=True)
            self._add_stats(LaterStats(meter, {"iterate": meter.startup + meter.wait}, 1, 0.0, 0, self._caller))
            self._meter = self._new_meter()

    def _new_meter(self) -> Meter:
        feed = self._source.prefetched
        return Meter(makes_batches=True, inner=feed._meter if feed else None)

    def _end_feed(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            feed._meter.end(after_step=not self._source.slow_to_start)  # such a source is not paused at the end of the loop
            feed.close()
            self._placement.leave_settings()
            self._add_stats(later_stats(feed)._replace(steps=self._consumed_of_feed))
            self._consumed_of_feed = 0

    def _cut_at_other_structure(self, ready: KerasItem) -> KerasItem:
        """Cut an item before the first batch whose structure differs from that of the batches before it."""
        batches = ready.item if is_partial(ready.item) else [ready.item][: ready.steps]
        for number, batch in enumerate(batches):
            failure = self._other_structure(batch, number)
            if failure is not None:
                return KerasItem(partial_batches(batches[:number]) if number else None, number, failure)
        return ready

    def _other_structure(self, batch: Batch, ahead: int) -> ValueError | None:
        """Return the error for a batch whose structure differs from that of the batches before it; None if it is the same."""
        structure = jax.tree.structure(batch)
        if self._structure is None:
            self._structure, self._parts, self._first = structure, _parts(batch), describe(batch)
        if structure == self._structure or _parts(batch) == self._parts:
            return None
        return ValueError(
            f"batch {self._consumed + ahead} of {self._source.name} has another structure than those before it: it holds "
            f"{describe(batch)} ({_parts(batch)}), where {self._first} ({self._parts}) is needed; all batches of a run "
            "need the same parts, (x, y) or (x, y, sample_weight), and the same keys"
        )


def _put(batch: Batch) -> Batch:
    """Place a batch on this thread, as Keras does."""
    return tree.map_structure(jax.device_put, batch, none_is_leaf=False)


def _parts(batch: Batch) -> Any:
    """Return the structure with arrays as leaves. The structure of a sparse array holds its shape, which may differ."""
    return jax.tree.structure(batch, is_leaf=lambda part: hasattr(part, "shape"))
