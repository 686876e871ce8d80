"""What batches for Keras are read from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

from penstock._clock import Clock
from penstock._makers import End, Makers
from penstock.data.loader import Loader
from penstock.data.tree import Batch
from penstock.feed.upstream import Produced, Upstream, as_upstream
from penstock.keras._replay import Replay

Direct = Literal["never", "always"]


class Source(Protocol):
    """A run of host batches, numbered from 0, that can be read from any of them on.

    Attributes:
      name: what errors call it.
      direct: whether batches are read by whoever wants them, without a thread.
      quick: the same batches, all of one structure, to be read without a thread as long as that takes less than to have them
        from one; then number 0 is the first that was not read here. None where there must be a thread.
      slow_to_start: its threads are kept between epochs.
    """

    name: str
    direct: Direct
    quick: Iterator[Batch] | None
    slow_to_start: bool

    def upstream(self, begin: int, first: int, limit: int | None) -> Upstream:
        """The batches from number `first` on, up to and without `limit`; what was read before is not read again.

        Here and in errors numbers begin at `begin`.
        """
        ...

    def take(self, number: int) -> Batch:
        """One batch, read here and now; StopIteration if there is none of that number."""
        ...

    def forget(self, number: int) -> None:
        """Nobody will ask for batches before that number."""
        ...


class Replayed:
    """An iterator of whatever kind, from its first batch on that was not forgotten.

    Args:
      convert: from a batch of it to what Keras takes.
      had: is told how many batches of this run Keras had, as they grow.
    """

    slow_to_start = False

    def __init__(
        self,
        name: str,
        replay: Replay,
        direct: Direct = "never",
        quick: Iterator[Batch] | None = None,
        convert: Callable[[Batch], Batch] | None = None,
        had: Callable[[int], None] | None = None,
    ):
        self.name, self.direct, self.quick = name, direct, quick
        self._replay, self._begin, self._convert, self._had = replay, replay.first, convert, had

    def upstream(self, begin: int, first: int, limit: int | None) -> Upstream:
        return _Reader(self.name, lambda number: self.take(number - begin), first, limit)

    def take(self, number: int) -> Batch:
        batch = self._replay.read(self._begin + number)
        return self._convert(batch) if self._convert else batch

    def forget(self, number: int) -> None:
        self._replay.forget(self._begin + number)
        if self._had:
            self._had(number)


class _Reader:
    """The `Upstream` of an iterator. See `Upstream`."""

    workers = 1
    batch_sizes: Sequence[int] = ()

    def __init__(self, name: str, read: Callable[[int], Batch], first: int, limit: int | None):
        self.name = name
        self._read, self._first, self._limit = read, first, limit

    def fingerprint(self) -> dict[str, Any]:
        return {"source": self.name}

    def restore(self, step: int, position: Any) -> None:
        raise TypeError("Keras data has no state to go back to")

    def makers(self, clocks: Sequence[Clock]) -> Makers:
        (clock,) = clocks

        def work(number: int) -> Batch:
            number += self._first
            if self._limit is not None and number >= self._limit:
                raise End
            with clock.time("iterate"):
                try:
                    return self._read(number)
                except StopIteration:
                    raise End from None
                except Exception as error:
                    error.add_note(f"penstock: while {self.name} made batch {number}")
                    raise

        return Makers([work])

    def split(self, item: Batch) -> Produced:
        return Produced(item, None)


class Loaded:
    """A `Loader`, from its start.

    Args:
      convert: from a batch of the Loader to what Keras takes.
    """

    name = "the Loader"
    direct: Direct = "never"
    quick: Iterator[Batch] | None = None

    def __init__(self, loader: Loader, convert: Callable[[Batch], Batch]):
        self.slow_to_start = loader.workers.kind == "process"  # an interpreter and its imports take seconds
        self._loader, self._convert = loader, convert
        self._kept: dict[int, Batch] = {}  # by number: made, and not had

    def upstream(self, begin: int, first: int, limit: int | None) -> Upstream:
        return _Kept(as_upstream(self._loader), first, self._kept, self._convert)

    def take(self, number: int) -> Batch:
        try:
            return self._convert(self._loader[number])
        except IndexError:
            raise StopIteration from None

    def forget(self, number: int) -> None:
        for had in [had for had in list(self._kept) if had < number]:
            del self._kept[had]


class _Kept:
    """An `Upstream` of a Loader, whose batches are kept until they are forgotten, and converted for Keras.

    Several workers write to `kept`, each under the numbers that it was given; they are read again by the workers of the
    next upstream.
    """

    def __init__(self, upstream: Upstream, start: int, kept: dict[int, Batch], convert: Callable[[Batch], Batch]):
        upstream.restore(start, None)
        self._upstream, self._start, self._kept, self._convert = upstream, start, kept, convert
        self.name, self.workers, self.batch_sizes = upstream.name, upstream.workers, upstream.batch_sizes

    def fingerprint(self) -> dict[str, Any]:
        return self._upstream.fingerprint()

    def restore(self, step: int, position: Any) -> None:
        raise TypeError("Keras data has no state to go back to")

    def makers(self, clocks: Sequence[Clock]) -> Makers:
        makers = self._upstream.makers(clocks)

        def keeping(work: Callable[[int], Batch]) -> Callable[[int], Batch]:
            def kept_work(number: int) -> Batch:
                step = self._start + number
                batch = self._kept.get(step)
                if batch is None:
                    batch = self._kept[step] = work(number)
                return batch

            return kept_work

        return makers._replace(works=[keeping(work) for work in makers.works], portable=False)

    def split(self, item: Batch) -> Produced:
        return Produced(self._convert(item), None)
