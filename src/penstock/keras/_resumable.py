"""Batches for Keras that can be read ahead, stopped, and read on later, so that no batch is lost or read twice.

The batches of a Loader or an iterator come in order, with a count of the batches that Keras has consumed. A batch that was read
and not consumed is kept, and the next reader begins with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from jax.sharding import Sharding

from penstock._clock import Clock
from penstock._producers import Exhausted, Producers
from penstock.data.loader import Loader
from penstock.data.order.rows import Rows
from penstock.data.steps import Steps
from penstock.data.tree import Batch
from penstock.feed.adapters import BatchAdapter, Produced, adapt
from penstock.feed.device_feed import Feed
from penstock.keras._aligned import copied
from penstock.keras._replay import Replay


class ResumableBatches(Protocol):
    """Batches in order, from the first one that Keras has not consumed. Batches that were read beyond it are kept.

    Attributes:
      name: the name in errors.
      prefetched: the feed that has read the batches ahead; None if there is none.
      threaded: whether a thread reads the batches ahead. For batches of a feed, or of arrays in memory, it would save no time.
      slow_to_start: whether the threads are kept between epochs.
    """

    name: str
    prefetched: Feed | None
    threaded: bool
    slow_to_start: bool

    def batch_adapter(self, limit: int | None) -> BatchAdapter:
        """Return an adapter for a `Feed` that reads from the first batch not consumed, at most `limit` batches."""
        ...

    def read(self, ahead: int) -> Batch:
        """Read, on this thread, the batch that is `ahead` after the first one not consumed.

        Raises:
          StopIteration: there is no such batch.
        """
        ...

    def consume(self) -> None:
        """Count the first batch not consumed as consumed, and drop it."""
        ...


class ResumableIterator:
    """The batches of an iterator of any kind.

    Args:
      name: the name in errors.
      replay: keeps the batches that were read.
      prefetched: see `ResumableBatches`.
      peeked: batches that come before those of the replay. Their arrays may be written to, so they are copied.
      convert: a function from a batch to the batch that Keras gets. It is called once for each batch.
    """

    slow_to_start = False

    def __init__(
        self,
        name: str,
        replay: Replay,
        *,
        prefetched: Feed | None = None,
        peeked: Sequence[Batch] = (),
        convert: Callable[[Batch], Batch] | None = None,
    ):
        self.name, self.prefetched, self.threaded = name, prefetched, prefetched is None
        self._replay, self._convert = replay, convert
        self._peeked = list(peeked)
        self._converted: dict[int, Batch] = {}  # by number in the replay

    def batch_adapter(self, limit: int | None) -> BatchAdapter:
        """Return an adapter for a `Feed` that reads from the first batch not consumed."""
        first = self._first
        return _IteratorAdapter(self.name, lambda number: self._read(first + number), limit)

    def read(self, ahead: int) -> Batch:
        """Read, on this thread, the batch that is `ahead` after the first one not consumed."""
        return self._read(self._first + ahead)

    def consume(self) -> None:
        """Count the first batch not consumed as consumed, and drop it."""
        first = self._first
        self._converted.pop(first, None)
        if self._peeked:
            self._peeked.pop(0)
        else:
            self._replay.forget(first + 1)

    @property
    def _first(self) -> int:
        """Return the number of the first batch not consumed. Peeked batches are numbered directly before the replay."""
        return self._replay.first - len(self._peeked)

    def _read(self, number: int) -> Batch:
        if number in self._converted:
            return self._converted[number]
        before = self._replay.first - number
        batch = copied(self._peeked[-before]) if before > 0 else self._replay.read(number)
        if self._convert is not None:
            batch = self._converted[number] = self._convert(batch)
        return batch


class UnthreadedBatches:
    """The batches of an iterator that nobody else reads, all of one structure, which need no thread.

    Args:
      name: the name in errors.
      batches: the iterator.
    """

    prefetched: Feed | None = None
    threaded = False
    slow_to_start = False

    def __init__(self, name: str, batches: Iterator[Batch]):
        self.name, self._batches = name, batches
        self._kept: deque[Batch] = deque()

    def batch_adapter(self, limit: int | None) -> BatchAdapter:
        """Raise NotImplementedError: no feed reads these batches."""
        raise NotImplementedError

    def read(self, ahead: int) -> Batch:
        """Read, on this thread, the batch that is `ahead` after the first one not consumed."""
        while len(self._kept) <= ahead:
            self._kept.append(next(self._batches))
        return self._kept[ahead]

    def consume(self) -> None:
        """Count the first batch not consumed as consumed, and drop it."""
        if self._kept:  # an error in the place of a batch is consumed too
            self._kept.popleft()


class _IteratorAdapter:
    """The `BatchAdapter` of a `ResumableIterator`."""

    workers = 1
    batch_sizes: Sequence[int] = ()

    def __init__(self, name: str, read: Callable[[int], Batch], limit: int | None):
        self.name = name
        self._read, self._limit = read, limit

    def fingerprint(self) -> dict[str, Any]:
        """Return all that must be equal for a saved state to fit."""
        return {"source": self.name}

    def restore(self, step: int, position: Any) -> None:
        """Raise TypeError: Keras has no saved position of its data."""
        raise TypeError(_NO_STATE)

    def read_for(self, shardings: Sequence[Sharding]) -> Rows | None:
        """Return None: the batches bring the rows of this process."""
        return None

    def producers(self, clocks: Sequence[Clock]) -> Producers:
        """Return the producers of the items, with one clock for each worker."""
        (clock,) = clocks

        def work(number: int) -> Batch:
            if self._limit is not None and number >= self._limit:
                raise Exhausted
            with clock.time("iterate"):
                try:
                    return self._read(number)
                except StopIteration:
                    raise Exhausted from None

        return Producers([work])

    def split(self, item: Batch) -> Produced:
        """Split a produced item into batch and position."""
        return Produced(item, None)


class ResumableLoader:
    """The batches of a `Loader` or of `Steps`, from the first step on.

    Args:
      loader: the Loader or Steps.
      convert: a function from a batch of the Loader to the batch that Keras gets. It runs on the worker that read the batch.
      first: number of the first batch.
    """

    prefetched: Feed | None = None
    threaded = True

    def __init__(self, loader: Loader | Steps, convert: Callable[[Batch], Batch] | None, first: int = 0):
        self.slow_to_start = loader.workers.kind == "process"  # an interpreter and its imports take seconds
        self.name = f"the {type(loader).__name__}"
        self._loader, self._convert = loader, convert
        self._first = first
        self._kept: dict[int, Batch] = {}  # by number: read and not consumed

    def batch_adapter(self, limit: int | None) -> BatchAdapter:
        """Return an adapter for a `Feed` that reads from the first batch not consumed."""
        return _KeepingAdapter(adapt(self._loader), self._first, self._kept, self._convert)

    def read(self, ahead: int) -> Batch:
        """Raise NotImplementedError: a Loader is always read through its adapter."""
        raise NotImplementedError

    def consume(self) -> None:
        """Count the first batch not consumed as consumed, and drop it."""
        self._kept.pop(self._first, None)
        self._first += 1


class _KeepingAdapter:
    """The `BatchAdapter` of a `ResumableLoader`: it converts batches for Keras and keeps them until they are consumed.

    Several workers write to `kept`, each under the numbers that it claimed. The workers of the next adapter read them there.
    """

    def __init__(self, batch_adapter: BatchAdapter, first: int, kept: dict[int, Batch], convert: Callable[[Batch], Batch] | None):
        batch_adapter.restore(first, None)
        self._batch_adapter, self._first, self._kept, self._convert = batch_adapter, first, kept, convert
        self.name, self.workers, self.batch_sizes = batch_adapter.name, batch_adapter.workers, batch_adapter.batch_sizes

    def fingerprint(self) -> dict[str, Any]:
        """Return all that must be equal for a saved state to fit."""
        return self._batch_adapter.fingerprint()

    def restore(self, step: int, position: Any) -> None:
        """Raise TypeError: Keras has no saved position of its data."""
        raise TypeError(_NO_STATE)

    def read_for(self, shardings: Sequence[Sharding]) -> Rows | None:
        """Read the rows that the devices of this process need."""
        return self._batch_adapter.read_for(shardings)

    def producers(self, clocks: Sequence[Clock]) -> Producers:
        """Return the producers of the items, with one clock for each worker."""
        producers = self._batch_adapter.producers(clocks)

        def keep_results(work: Callable[[int], Batch], clock: Clock) -> Callable[[int], Batch]:
            def work_or_kept(number: int) -> Batch:
                batch = self._kept.get(self._first + number)
                if batch is None:
                    batch = work(number)
                    if self._convert:
                        with clock.time("unpack"):
                            batch = self._convert(batch)
                    self._kept[self._first + number] = batch
                return batch

            return work_or_kept

        return producers._replace(works=[*map(keep_results, producers.works, clocks)])

    def split(self, item: Batch) -> Produced:
        """Split a produced item into batch and position."""
        return Produced(item, None)


_NO_STATE = "Keras data has no state to go back to"
