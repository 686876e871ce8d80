"""The iterator that Keras takes its batches from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
from keras.src import tree

from penstock._feed.device_feed import Feed
from penstock._feed.stats import Stats
from penstock.data.tree import Batch, describe
from penstock.keras._execution import Executions, Ready, assemble, gather
from penstock.keras._placement import KerasPlacement
from penstock.keras._resumable import Source
from penstock.keras._versions import behaviour, is_partial, partial_batches

# Seconds a batch from which a thread is of use: having a batch from one takes 0.1 ms of a busy machine. Where so many in a
# row take longer, it is the batches, and not another process that had the core for a moment.
_SLOW = 150e-6
_IN_A_ROW = 8

_DEVICE_BUFFER = 2
_HOST_BUFFER = 4


class Batches(Iterator[Batch]):
    """Batches of one source, read ahead while Keras is in its loop over batches, and by nobody while it is not.

    A `Feed` reads them, whose threads `pause` ends. What it had read by then lies with the source, and is where the next feed
    begins: nothing is lost or read twice. A batch counts as had when Keras takes it, not when it is looked at, which is before
    Keras begins what it cannot break off.

    *Errors.* What stands in the place of a batch comes at that batch, once. Where Keras is inside of an execution of several
    steps, whose state it would lose, the batches before it end the execution first: `failure` then holds the error.

    *Executions.* A version of Keras that stacks takes all batches of an execution at one `next`: what is read, placed and looked
    at is then an execution (`_execution`), and what is had is counted in batches all the same.

    Args:
      note: is given the statistics of each feed when it ends.
      limit: batches that Keras takes until its epoch ends, where the source must not be read beyond that; None for no limit.
      steps_per_execution: that Keras takes in one execution.
      whole: an execution ends at every multiple of so many batches; None where the source ends by itself.
    """

    def __init__(
        self,
        source: Source,
        note: Callable[[Stats], None],
        limit: int | None,
        steps_per_execution: int,
        whole: int | None = None,
    ):
        self._behaviour = behaviour()
        self._at_once = steps_per_execution if self._behaviour.stacks else 1  # batches that Keras takes at one `next`
        self._source, self._placement, self._note = source, KerasPlacement(self._at_once), note
        self._limit, self._steps, self._whole = limit, steps_per_execution, whole
        self._feed: Feed | None = None
        self._fed = 0  # batches that were had of this feed
        self._feed_ends = -1  # number of the batch that the feed has no more, if it has a limit
        self._quick = source.quick
        self._looked_at: list[Ready] = []  # at most one: the next
        self._last_quick = False  # the batch that was looked at is no more of the source's
        self._structure: Any = None
        self._parts: Any = None
        self._first = ""
        self._in_execution = 0  # batches that Keras had in this one
        self._directly = _Directly()
        self._had = 0
        self.failure: BaseException | None = None

    def look(self) -> bool:
        """Wait for the next batch, before Keras begins an execution: False if there is none.

        Raises:
          BaseException: what stands in its place.
        """
        self._in_execution = 0
        if not self._looked_at:
            try:
                self._looked_at.append(self._take())
            except StopIteration:
                return False
        return True

    def __next__(self) -> Any:
        if self._looked_at:
            ready = self._looked_at.pop()
        else:
            if self._whole and self._in_execution and self._had % self._whole == 0:
                raise StopIteration
            try:
                ready = self._take()
            except StopIteration:
                raise
            except BaseException as error:
                if self._in_execution == 0:
                    raise
                self.failure = error
                raise StopIteration from None
        self._in_execution += ready.steps
        self._have(ready.steps)
        if ready.failure is not None:
            self.failure = self._in_place(ready.failure)
        self._last_quick = False
        return ready.item

    def _take(self) -> Ready:
        if self._quick is not None:
            ready = self._take_quick(self._quick)
        else:
            try:
                ready = self._take_directly() if self._source.direct else self._from_feed()
            except StopIteration:
                self._end_feed()
                raise
            except Exception as error:
                self._in_place(error)
                raise
            ready = self._as_far_as_alike(ready)
        if ready.steps:
            return ready
        assert ready.failure is not None
        failure = self._in_place(ready.failure)
        del ready
        try:
            raise failure
        finally:
            del failure  # or its traceback would hold this frame, and this frame it

    def _in_place(self, error: BaseException) -> BaseException:
        """Say in whose place an error stands, and leave out that batch, or the next one who reads would have it again."""
        error.add_note(f"penstock: in the place of batch {self._had} of {self._source.name}")
        self._end_feed()
        self._have(1)
        return error

    def _have(self, batches: int) -> None:
        """Count batches of the source as had."""
        self._had += batches
        if self._quick is None and not self._last_quick:
            for _ in range(batches):
                self._source.had()

    def _take_quick(self, batches: Iterator[Batch]) -> Ready:
        """In as few steps as can be: they are all that this costs where there is nothing to gain."""
        if self._at_once > 1:
            execution = gather(lambda _: self._read_quick(batches), range(self._at_once))
            ready = assemble(execution, self._at_once, lambda batch, stacked: _put(batch))
        else:
            batch = self._read_quick(batches)
            ready = Ready(_put(batch) if self._behaviour.on_device else batch)
        if self._directly.slow_in_a_row >= _IN_A_ROW:
            self._quick, self._last_quick = None, True  # the source begins after these
        return ready

    def _read_quick(self, batches: Iterator[Batch]) -> Batch:
        begin = time.perf_counter()
        batch = next(batches)
        self._directly.add(begin, time.perf_counter())
        return batch

    def _take_directly(self) -> Ready:
        if self._at_once == 1:
            return Ready(self._read_directly(0))
        # Batches that are placed stay where they are, and are stacked there.
        return assemble(gather(self._read_directly, range(self._at_once)), self._at_once, lambda batch, stacked: batch)

    def _read_directly(self, ahead: int) -> Batch:
        begin = time.perf_counter()
        batch = self._source.take(ahead)
        self._directly.add(begin, time.perf_counter())
        return batch

    def _from_feed(self) -> Ready:
        if self._feed is None:
            self._feed = self._start()
        try:
            item = next(self._feed)
        except StopIteration:
            if self._had != self._feed_ends:
                raise
            # Keras takes more than it said: somebody's own train function.
            self._end_feed()
            self._feed = self._start()
            item = next(self._feed)
        ready = item if self._at_once > 1 else Ready(item)
        self._fed += ready.steps
        return ready

    def _start(self) -> Feed:
        self._placement.take_settings()
        self._feed_ends = -1 if self._limit is None else self._had + self._limit
        batch_adapter, host_buffer, device_buffer = (
            self._source.batch_adapter(self._limit),
            max(_HOST_BUFFER, self._steps),
            _DEVICE_BUFFER,
        )
        if self._at_once > 1:
            batch_adapter = Executions(batch_adapter, self._at_once, self._whole, self._had)
            # An execution lies ready while another runs: as many batches as without stacks, or more.
            host_buffer, device_buffer = -(-host_buffer // self._at_once), 1
        return Feed(
            batch_adapter,
            self._placement,
            host_buffer=host_buffer,
            device_buffer=device_buffer,
            timeout=None,
            strict=False,
            first=self._had,
        )

    def pause(self) -> None:
        """Keras has left its loop: end the threads, and wait for them, unless they are slow to start again.

        The next `next()` starts others.
        """
        if not self._source.slow_to_start:
            self.close()

    def give_way(self) -> None:
        """Another loop begins inside of this one, perhaps over the same data: end the threads, and leave it what was not had."""
        self._end_feed()
        if self._quick is None and not self._last_quick:
            self._looked_at.clear()

    def close(self) -> None:
        """End the threads, and wait for them as `Feed.close` does."""
        self.give_way()
        if self._directly.steps:
            self._note(self._directly.stats())
            self._directly = _Directly()

    def _end_feed(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()
            self._placement.leave_settings()
            self._note(replace(feed.stats(), steps=self._fed))
            self._fed = 0

    def _as_far_as_alike(self, ready: Ready) -> Ready:
        """Return what was taken up to the first batch that has another structure than those before it."""
        batches = ready.item if is_partial(ready.item) else [ready.item][: ready.steps]
        for number, batch in enumerate(batches):
            failure = self._other_structure(batch, number)
            if failure is not None:
                return Ready(partial_batches(batches[:number]) if number else None, number, failure)
        return ready

    def _other_structure(self, batch: Batch, ahead: int) -> ValueError | None:
        """Return the error for a batch that has another structure than those before it, None for one that has not."""
        structure = jax.tree.structure(batch)
        if self._structure is None:
            self._structure, self._parts, self._first = structure, _parts(batch), describe(batch)
        if structure == self._structure or _parts(batch) == self._parts:
            return None
        return ValueError(
            f"batch {self._had + ahead} of {self._source.name} has another structure than those before it: it holds "
            f"{describe(batch)} ({_parts(batch)}), where {self._first} ({self._parts}) is needed; all batches of a run "
            "need the same parts, (x, y) or (x, y, sample_weight), and the same keys"
        )


def _put(batch: Batch) -> Batch:
    """Place a batch as Keras does on this thread."""
    return tree.map_structure(jax.device_put, batch, none_is_leaf=False)


def _parts(batch: Batch) -> Any:
    """Its structure down to the arrays; that of a sparse one has its shape in it, which may differ."""
    return jax.tree.structure(batch, is_leaf=lambda part: hasattr(part, "shape"))


class _Directly:
    """Statistics of batches that were read without a feed."""

    def __init__(self) -> None:
        self.steps = self.slow_in_a_row = 0
        self._reading = self._startup = self._first_at = self._last_at = 0.0

    def add(self, begin: float, end: float) -> None:
        """Count a batch that was read from `begin` to `end`, in seconds."""
        if end - begin > _SLOW:
            self.slow_in_a_row += 1
        else:
            self.slow_in_a_row = 0
        if self.steps:
            self._reading += end - begin
        else:
            self._startup, self._first_at = end - begin, end
        self._last_at = end
        self.steps += 1

    def stats(self) -> Stats:
        return Stats(
            steps=self.steps,
            startup=self._startup,
            seconds=self._last_at - self._first_at,
            wait=self._reading,
            host={"iterate": self._reading},
            workers=1,
            place=0.0,
            bytes=0,
        )
