"""The iterator that Keras takes its batches from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from penstock.data.tree import Batch, describe
from penstock.feed.feed import Feed
from penstock.feed.stats import Stats
from penstock.keras._place import KerasPlacement
from penstock.keras._source import Source

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

    Args:
      note: is given the statistics of each feed when it ends.
      epoch: batches that Keras takes until its epoch ends, where the source must not be read beyond that; None for no limit.
      steps_per_execution: that Keras takes in one execution.
    """

    def __init__(
        self,
        source: Source,
        placement: KerasPlacement,
        note: Callable[[Stats], None],
        epoch: int | None,
        steps_per_execution: int,
    ):
        self._source, self._placement, self._note = source, placement, note
        self._epoch, self._host_buffer = epoch, max(_HOST_BUFFER, steps_per_execution)
        self._feed: Feed | None = None
        self._direct = source.direct
        self._limit: int | None = None
        self._looked_at: list[Batch] = []  # at most one: the next
        self._structure: Any = None
        self._first = ""
        self._in_execution = 0  # batches that Keras had in this one
        self._directly = _Directly()
        self.had = 0
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

    def __next__(self) -> Batch:
        if self._looked_at:
            batch = self._looked_at.pop()
        else:
            try:
                batch = self._take()
            except StopIteration:
                raise
            except BaseException as error:
                if self._in_execution == 0:
                    raise
                self.failure = error
                raise StopIteration from None
        self._in_execution += 1
        self._count()
        return batch

    def _take(self) -> Batch:
        try:
            if self._direct == "quick":
                return self._read(self._source.pop)
            batch = self._read(lambda: self._source.take(self._next)) if self._direct == "always" else self._from_feed()
        except StopIteration:
            self._end_feed()
            raise
        except Exception:
            self._count()  # or the next one who reads would have it again
            self._end_feed()
            raise
        self._check_structure(batch)
        return batch

    @property
    def _next(self) -> int:
        """Number of the batch to be read next."""
        return self.had + len(self._looked_at)

    def _count(self) -> None:
        self.had += 1
        if self._direct != "quick":
            self._source.forget(self.had)

    def _read(self, read: Callable[[], Batch]) -> Batch:
        begin = time.perf_counter()
        batch = read()
        self._directly.add(begin, time.perf_counter())
        if self._directly.slow_in_a_row >= _IN_A_ROW and self._direct == "quick":
            self._direct = "never"
        return batch

    def _from_feed(self) -> Batch:
        if self._feed is None:
            self._start()
        assert self._feed is not None
        try:
            return next(self._feed)
        except StopIteration:
            if self._limit is None or self._next < self._limit:
                raise
        # Keras takes more than it said: somebody's own train function.
        self._end_feed()
        self._start()
        return next(self._feed)

    def _start(self) -> None:
        self._placement.take_settings()
        self._limit = None if self._epoch is None else self._next + self._epoch
        self._feed = Feed(
            self._source.upstream(self._next, self._limit),
            self._placement,
            host_buffer=self._host_buffer,
            device_buffer=_DEVICE_BUFFER,
            timeout=None,
            strict=False,
        )

    def pause(self) -> None:
        """Keras has left its loop: end the threads, and wait for them, unless they are slow to start again.

        The next `next()` starts others.
        """
        if not self._source.slow_to_start:
            self.close()

    def close(self) -> None:
        """End the threads, and wait for them as `Feed.close` does."""
        self._end_feed()
        if self._directly.steps:
            self._note(self._directly.stats())
            self._directly = _Directly()

    def _end_feed(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()
            self._placement.leave_settings()
            self._note(feed.stats())

    def _check_structure(self, batch: Batch) -> None:
        structure = jax.tree.structure(batch)
        if self._structure is None:
            self._structure, self._first = structure, describe(batch)
        if structure != self._structure:
            self._count()
            raise ValueError(
                f"batch {self.had - 1} of {self._source.name} has another structure than those before it: it holds "
                f"{describe(batch)} ({structure}), where {self._first} ({self._structure}) is needed; all batches of a run "
                "need the same parts, (x, y) or (x, y, sample_weight), and the same keys"
            )


class _Directly:
    """Statistics of batches that were read without a feed."""

    def __init__(self) -> None:
        self.steps = self.slow_in_a_row = 0
        self._reading = self._startup = self._first_at = self._last_at = 0.0

    def add(self, begin: float, end: float) -> None:
        """Count a batch that was read from `begin` to `end`, in seconds."""
        seconds = end - begin
        self.slow_in_a_row = self.slow_in_a_row + 1 if seconds > _SLOW else 0
        if self.steps:
            self._reading += seconds
        else:
            self._startup, self._first_at = seconds, end
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
