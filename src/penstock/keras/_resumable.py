"""What batches for Keras are read from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from penstock._clock import Clock
from penstock._feed.adapters import BatchAdapter, Produced, adapt
from penstock._producers import Exhausted, Producers
from penstock.data.loader import Loader
from penstock.data.tree import Batch
from penstock.keras._aligned import copied
from penstock.keras._replay import Replay


class Source(Protocol):
    """Batches in a row, of which some were had, and those that were read beyond them are kept.

    Attributes:
      name: what errors call it.
      direct: batches are ahead of time already, and taken without a thread.
      quick: the same batches, all of one structure, to be read without a thread as long as that takes less than to have them
        from one; None where there must be a thread.
      slow_to_start: its threads are kept between epochs.
    """

    name: str
    direct: bool
    quick: Iterator[Batch] | None
    slow_to_start: bool

    def batch_adapter(self, limit: int | None) -> BatchAdapter:
        """The batches from the first one on that was not had, no more than `limit`."""
        ...

    def take(self, ahead: int) -> Batch:
        """The batch so many after the first that was not had, read here and now; StopIteration if there is none."""
        ...

    def had(self) -> None:
        """The first batch that was not had now is."""
        ...


class Read:
    """An iterator of whatever kind.

    Args:
      peeked: batches that come before those of the replay, and that may be written to.
      convert: from a batch of these to what Keras takes; called once for each.
    """

    slow_to_start = False

    def __init__(
        self,
        name: str,
        replay: Replay,
        *,
        direct: bool = False,
        quick: Iterator[Batch] | None = None,
        peeked: Sequence[Batch] = (),
        convert: Callable[[Batch], Batch] | None = None,
    ):
        self.name, self.direct, self.quick = name, direct, quick
        self._replay, self._convert = replay, convert
        self._peeked = list(peeked)
        self._converted: dict[int, Batch] = {}  # by number in the replay

    def batch_adapter(self, limit: int | None) -> BatchAdapter:
        first = self._first
        return _Reader(self.name, lambda number: self._read(first + number), limit)

    def take(self, ahead: int) -> Batch:
        return self._read(self._first + ahead)

    def had(self) -> None:
        first = self._first
        self._converted.pop(first, None)
        if self._peeked:
            self._peeked.pop(0)
        else:
            self._replay.forget(first + 1)

    @property
    def _first(self) -> int:
        """Number of the first batch that was not had. What was peeked comes right before the rest of the replay."""
        return self._replay.first - len(self._peeked)

    def _read(self, number: int) -> Batch:
        if number in self._converted:
            return self._converted[number]
        before = self._replay.first - number
        batch = copied(self._peeked[-before]) if before > 0 else self._replay.read(number)
        if self._convert is not None:
            batch = self._converted[number] = self._convert(batch)
        return batch


class _Reader:
    """The `Upstream` of an iterator. See `Upstream`."""

    workers = 1
    batch_sizes: Sequence[int] = ()

    def __init__(self, name: str, read: Callable[[int], Batch], limit: int | None):
        self.name = name
        self._read, self._limit = read, limit

    def fingerprint(self) -> dict[str, Any]:
        return {"source": self.name}

    def restore(self, step: int, position: Any) -> None:
        raise TypeError(_NO_STATE)

    def producers(self, clocks: Sequence[Clock]) -> Producers:
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
        return Produced(item, None)


class Loaded:
    """A `Loader`, from its start.

    Args:
      convert: from a batch of the Loader to what Keras takes; on the worker that made it.
    """

    name = "the Loader"
    direct = False
    quick: Iterator[Batch] | None = None

    def __init__(self, loader: Loader, convert: Callable[[Batch], Batch] | None):
        self.slow_to_start = loader.workers.kind == "process"  # an interpreter and its imports take seconds
        self._loader, self._convert = loader, convert
        self._first = 0
        self._kept: dict[int, Batch] = {}  # by number: made, and not had

    def batch_adapter(self, limit: int | None) -> BatchAdapter:
        return _Kept(adapt(self._loader), self._first, self._kept, self._convert)

    def take(self, ahead: int) -> Batch:
        raise NotImplementedError  # it is never direct

    def had(self) -> None:
        self._kept.pop(self._first, None)
        self._first += 1


class _Kept:
    """An `Upstream` of a Loader, whose batches are converted for Keras, and kept until they are had.

    Several workers write to `kept`, each under the numbers that it was given; they are read again by the workers of the
    next upstream.
    """

    def __init__(self, batch_adapter: BatchAdapter, first: int, kept: dict[int, Batch], convert: Callable[[Batch], Batch] | None):
        batch_adapter.restore(first, None)
        self._batch_adapter, self._first, self._kept, self._convert = batch_adapter, first, kept, convert
        self.name, self.workers, self.batch_sizes = batch_adapter.name, batch_adapter.workers, batch_adapter.batch_sizes

    def fingerprint(self) -> dict[str, Any]:
        return self._batch_adapter.fingerprint()

    def restore(self, step: int, position: Any) -> None:
        raise TypeError(_NO_STATE)

    def producers(self, clocks: Sequence[Clock]) -> Producers:
        producers = self._batch_adapter.producers(clocks)

        def keeping(work: Callable[[int], Batch]) -> Callable[[int], Batch]:
            def kept_work(number: int) -> Batch:
                batch = self._kept.get(self._first + number)
                if batch is None:
                    batch = work(number)
                    batch = self._kept[self._first + number] = self._convert(batch) if self._convert else batch
                return batch

            return kept_work

        return producers._replace(works=[keeping(work) for work in producers.works], may_run_inline=False)

    def split(self, item: Batch) -> Produced:
        return Produced(item, None)


_NO_STATE = "Keras data has no state to go back to"
