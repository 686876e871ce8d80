"""Batches for Keras that can be read ahead, stopped, and read on later, so that no batch is lost or read twice.

A batch is *consumed* when Keras takes it. `ResumableBatches` keep each batch that was read and not consumed, and the next reader
begins with it. A `Replay` does this for any iterator: it numbers the items, and keeps each one until it is forgotten.

`aligned` copies host arrays to memory that a CPU device can use. XLA uses the memory of a NumPy array directly if it begins at a
multiple of 64 bytes; NumPy aligns to 16. Otherwise XLA copies it in the call of the jitted function, on the thread that trains
(20 MB: 1.8 ms instead of 5 µs). The tree functions are Keras's, which keep the order of the keys of a dict.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from jax.sharding import Sharding
from keras.src import tree

from penstock._clock import Clock
from penstock._pipeline import Exhausted, Producers
from penstock.data.loader import Loader
from penstock.data.order.rows import Rows
from penstock.data.steps import Steps
from penstock.data.tree import Batch, is_numeric
from penstock.feed.adapters import BatchAdapter, Produced, adapt
from penstock.feed.device_feed import Feed


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
      name, prefetched: see `ResumableBatches`.
      replay: keeps the batches that were read.
      peeked: batches before the first one of the replay. Their arrays may be written to, so they are copied.
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
        first = self._first
        return _IteratorAdapter(self.name, lambda number: self._read(first + number), limit)

    def read(self, ahead: int) -> Batch:
        return self._read(self._first + ahead)

    def consume(self) -> None:
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
    """The batches of an iterator that nobody else reads, all of one structure, which need no thread."""

    prefetched: Feed | None = None
    threaded = False
    slow_to_start = False

    def __init__(self, name: str, batches: Iterator[Batch]):
        self.name, self._batches = name, batches
        self._kept: deque[Batch] = deque()

    def batch_adapter(self, limit: int | None) -> BatchAdapter:
        raise NotImplementedError("no feed reads these batches")

    def read(self, ahead: int) -> Batch:
        while len(self._kept) <= ahead:
            self._kept.append(next(self._batches))
        return self._kept[ahead]

    def consume(self) -> None:
        if self._kept:  # an error in the place of a batch is consumed too
            self._kept.popleft()


class _AdapterWithoutState:
    """The part of a `BatchAdapter` that concerns positions: Keras saves none of its data."""

    def restore(self, step: int, position: Any) -> None:
        raise TypeError("Keras data has no state to go back to")

    def split(self, item: Batch) -> Produced:
        return Produced(item, None)


class _IteratorAdapter(_AdapterWithoutState):
    """The `BatchAdapter` of a `ResumableIterator`."""

    workers = 1
    batch_sizes: Sequence[int] = ()

    def __init__(self, name: str, read: Callable[[int], Batch], limit: int | None):
        self.name = name
        self._read, self._limit = read, limit

    def fingerprint(self) -> dict[str, Any]:
        return {"source": self.name}

    def read_for(self, shardings: Sequence[Sharding]) -> Rows | None:
        return None

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


class ResumableLoader:
    """The batches of a `Loader` or of `Steps`, from the first step on.

    Args:
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
        return _KeepingAdapter(adapt(self._loader), self._first, self._kept, self._convert)

    def read(self, ahead: int) -> Batch:
        raise NotImplementedError("a Loader is read through its adapter")

    def consume(self) -> None:
        self._kept.pop(self._first, None)
        self._first += 1


class _KeepingAdapter(_AdapterWithoutState):
    """The `BatchAdapter` of a `ResumableLoader`: it converts batches for Keras and keeps them until they are consumed.

    Several workers write to `kept`, each under the numbers that it claimed. The workers of the next adapter read them there.
    """

    def __init__(self, batch_adapter: BatchAdapter, first: int, kept: dict[int, Batch], convert: Callable[[Batch], Batch] | None):
        batch_adapter.restore(first, None)
        self._batch_adapter, self._first, self._kept, self._convert = batch_adapter, first, kept, convert
        self.name, self.workers, self.batch_sizes = batch_adapter.name, batch_adapter.workers, batch_adapter.batch_sizes
        self.fingerprint, self.read_for = batch_adapter.fingerprint, batch_adapter.read_for

    def producers(self, clocks: Sequence[Clock]) -> Producers:
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

        return producers._replace(works=[*map(keep_results, producers.works, clocks)], inline=False)


# Replay of an iterator.


class _Failed(NamedTuple):
    """An error, kept in the place of an item."""

    error: BaseException


class Replay:
    """The items of an iterator, numbered from 0. Each is read once, and kept until it is forgotten.

    A reader may stop at any item. The next reader, on another thread, begins at the first item that is not forgotten. There may
    be several readers one after the other, but not at the same time.

    *Threads.* One thread at a time is inside of `read_next`, and it may stay there for a long time. Another thread that needs an
    item waits for that thread, and then finds the item kept. So a reader that is stopped during a read has read for its
    successor. `forget` takes no lock: only the one consumer calls it, for numbers that it has consumed and that nobody reads
    again. Reading changes `_count` and adds items; forgetting changes `first` and removes items. Each is a single operation on a
    dict.

    Args:
      read_next: returns the next item or raises StopIteration. It is not called again after it has raised any error.
      copy: whether to copy the NumPy arrays of the items, because the iterator may fill the same buffer for each item.
      state: returns the position of the iterator, before each item; None if `state` is not called.

    Attributes:
      first: number of the first item that is not forgotten.
    """

    def __init__(self, read_next: Callable[[], Any], copy: bool, state: Callable[[], Any] | None = None):
        self._read_next, self._copy, self._state = read_next, copy, state
        self._states: dict[int, Any] = {}  # by number: before the items that are not forgotten
        self._reading = threading.Lock()
        self._kept: dict[int, Any] = {}
        self._count = 0
        self._ended = False
        self.first = 0

    def read(self, number: int) -> Any:
        """Return an item that is not forgotten, and read up to it if necessary.

        Raises:
          StopIteration: there is no such item.
          BaseException: the error of the iterator in the place of the item.
        """
        with self._reading:
            while self._count <= number and not self._ended:
                self._read_one()
        if number >= self._count:
            raise StopIteration
        item = self._kept[number]
        if not isinstance(item, _Failed):
            return item
        try:
            raise item.error
        finally:
            del item  # otherwise its traceback and this frame would refer to each other

    def state(self) -> Any:
        """Return the position of the iterator before the first item that is not forgotten."""
        assert self._state is not None
        return self._states[self.first] if self.first in self._states else self._state()

    def _read_one(self) -> None:
        if self._state is not None:
            self._states[self._count] = self._state()
        try:
            item = self._read_next()
            self._kept[self._count] = copied(item) if self._copy else item
        except StopIteration:
            self._ended = True
            return
        except BaseException as error:
            self._ended = True
            self._kept[self._count] = _Failed(error)
        self._count += 1

    def pop(self) -> Any:
        """Return the first item that is not forgotten, and forget it. It is copied only if it was kept.

        Raises:
          StopIteration, BaseException: as for `read`.
        """
        with self._reading:
            if not self._kept and not self._ended:
                try:
                    item = self._read_next()
                except BaseException:
                    self._ended = True
                    raise
                self._count = self.first = self._count + 1
                return item
        try:
            return self.read(self.first)
        finally:
            self.forget(self.first + 1)

    def forget(self, number: int) -> None:
        """Drop the items before a number."""
        for consumed in range(self.first, number):
            self._kept.pop(consumed, None)
            self._states.pop(consumed, None)
        self.first = max(self.first, number)

    def __iter__(self) -> Iterator[Any]:
        """Yield the items from the first one that is not forgotten on. Yielded items are kept until they are forgotten."""
        for number in itertools.count(self.first):
            try:
                item = self.read(number)
            except StopIteration:
                return
            yield item


def opening(open_iterable: Callable[[], Iterable[Any]]) -> Callable[[], Any]:
    """Return a `read_next` that opens an iterable on the thread that reads its first item."""
    iterator: Iterator[Any] | None = None

    def read_next() -> Any:
        nonlocal iterator
        if iterator is None:
            iterator = iter(open_iterable())
        return next(iterator)

    return read_next


# By iterator, for as long as the iterators live.
_replays: weakref.WeakKeyDictionary[Iterator[Any], Replay] = weakref.WeakKeyDictionary()


def replay_of(iterator: Iterator[Any], copy: bool = True, state: Callable[[Any], Any] | None = None) -> Replay:
    """Return the one Replay of an iterator, with the items that an earlier reader did not consume.

    It does not keep the iterator alive. `state` returns the position of the iterator that it is given; for `copy` see `Replay`.

    Raises:
      TypeError: the iterator does not support weak references.
    """
    if iterator not in _replays:
        weak = weakref.ref(iterator)

        def read_next() -> Any:
            alive = weak()
            if alive is None:
                raise StopIteration
            return next(alive)

        _replays[iterator] = Replay(read_next, copy, None if state is None else lambda: state(weak()))
    return _replays[iterator]


def is_replayed(iterator: Iterator[Any]) -> bool:
    """Return whether an iterator has a Replay."""
    try:
        return iterator in _replays
    except TypeError:
        return False


# Aligned arrays.

_ALIGNMENT = 64  # bytes: kMinAlign of XLA's CPU client


def aligned(batch: Any) -> Any:
    """Copy the NumPy arrays of numbers that are not aligned to aligned memory; leave all other leaves as they are."""
    return tree.map_structure(lambda leaf: _copy(leaf) if _is_unaligned(leaf) else leaf, batch, none_is_leaf=False)


def copied(batch: Any) -> Any:
    """Copy all NumPy arrays to aligned memory; leave all other leaves as they are."""
    return tree.map_structure(lambda leaf: _copy(leaf) if isinstance(leaf, np.ndarray) else leaf, batch, none_is_leaf=False)


def _is_unaligned(leaf: Any) -> bool:
    return (
        isinstance(leaf, np.ndarray)
        and is_numeric(leaf.dtype)
        and (leaf.ctypes.data % _ALIGNMENT != 0 or not leaf.flags.c_contiguous)
    )


def _copy(array: np.ndarray) -> np.ndarray:
    if not is_numeric(array.dtype):
        return array.copy()
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an aligned array of numbers with undefined values."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)
