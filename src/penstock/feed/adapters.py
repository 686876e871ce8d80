"""Adapt a `Loader`, `Steps` or any iterable of batches to the producers, the fingerprint and the position that a `Feed` needs."""

from __future__ import annotations

import inspect
import math
import os
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from jax.sharding import Sharding

from penstock._clock import Clock
from penstock._pipeline import Exhausted, Producers
from penstock.data.collate import pad_to
from penstock.data.loader import Loader
from penstock.data.order.rows import Rows
from penstock.data.source import Source
from penstock.data.steps import Steps
from penstock.data.streams.jsonl import JsonLines
from penstock.data.streams.records import decode_state, encode_state
from penstock.data.streams.webdataset import WebDataset
from penstock.data.tree import Batch, to_arrays


class NoPosition(NamedTuple):
    """The position of a source to which no feed can return. The reason also says what to feed instead."""

    reason: str


class Produced(NamedTuple):
    """A host batch, and the position of its source after it.

    Attributes:
      position: a value for JSON; None if the number of batches is the position; or `NoPosition`.
    """

    batch: Batch
    position: Any


class BatchAdapter(Protocol):
    """A source of host batches, as a `Feed` uses it. (The `DataAdapter` of Keras is in `penstock.keras`.)

    Attributes:
      name: the name in errors.
      workers: number of threads or processes that make batches.
      batch_sizes: the different numbers of records in its global batches; empty if unknown.
    """

    name: str
    workers: int
    batch_sizes: Sequence[int]

    def fingerprint(self) -> dict[str, Any]:
        """Return all that must be equal for a saved state of one source to fit another."""

    def restore(self, step: int, position: Any) -> None:
        """Continue after `step` batches, or raise TypeError if the source cannot. To be called before `producers`."""

    def read_for(self, shardings: Sequence[Sharding]) -> Rows | None:
        """Read only the rows that the devices of this process need, for shardings over several processes, and return them.

        To be called before `producers`. None is returned if the batches bring the rows of this process.
        """

    def producers(self, clocks: Sequence[Clock]) -> Producers:
        """Return the producers of the batches for a `PrefetchPipeline`, with one clock for each worker."""

    def split(self, item: Any) -> Produced:
        """Split a produced item into batch and position."""


def adapt(batches: Any, by: Literal["ps.feed", "pk.data"] = "ps.feed") -> BatchAdapter:
    """Choose the adapter of a Loader or an iterable.

    Args:
      batches: the argument of the user.
      by: the function that the user has called, for errors.

    Raises:
      TypeError: `batches` is not an iterable of batches.
      ValueError: `batches` is an iterator that was fed before, or a generator that was started or is exhausted.
    """
    if isinstance(batches, (Loader, Steps)):
        return _StepAdapter(batches)
    if isinstance(batches, (str, bytes, os.PathLike, Mapping)) or _is_data(batches) or not isinstance(batches, Iterable):
        parts = f" of {', '.join(type(part).__name__ for part in batches)}" if isinstance(batches, tuple) else ""
        raise TypeError(f"{by} needs an iterable of batches, got {type(batches).__name__}{parts}: {_remedy(batches, by)}")
    return _IterableAdapter(batches)


def _is_data(batches: Any) -> bool:
    """Return whether `batches` is data and not an iterable of batches: an array, a table, or a tuple (inputs, labels)."""
    if isinstance(batches, tuple) and all(hasattr(part, "shape") and hasattr(part, "dtype") for part in batches):
        return len({part.shape[:1] for part in batches}) == 1 and len({(part.shape, part.dtype) for part in batches}) > 1
    return hasattr(batches, "dtype") or type(batches).__module__.partition(".")[0] in ("pandas", "polars", "pyarrow")


def _remedy(batches: Any, by: str) -> str:
    """Say what to give instead of data that is not an iterable of batches."""
    if isinstance(batches, (str, bytes, os.PathLike)):
        return (
            f"for the images of a folder, {by}(ps.Loader(ps.images(folder, size=...), batch_size=...)); for a file of records, "
            f"{by}(ps.Loader(ps.as_source(file), batch_size=...))"
        )
    if isinstance(batches, (JsonLines, WebDataset)):
        return f"for its records, {by}(ps.stream(records, batch_size=...))"
    if isinstance(batches, Source):
        return f"for its records, {by}(ps.Loader(source, batch_size=...))"
    return f"for arrays of records, {by}(ps.Loader(arrays, batch_size=...)); for a single batch, {by}([batch])"


def given_to(adapter: BatchAdapter) -> Any:
    """Return the Loader or iterable that `adapt` was called with; raise TypeError for another adapter."""
    if not isinstance(adapter, (_StepAdapter, _IterableAdapter)):
        raise TypeError("only a feed made by ps.feed can be opened again")
    return adapter.given


def has_choice_of_shapes(adapter: BatchAdapter) -> bool:
    """Tell whether `pad_to` chooses one of several lengths for each batch, so that several shapes are intended."""
    batches = adapter.given if isinstance(adapter, (_StepAdapter, _IterableAdapter)) else None
    collate = getattr(batches, "collate", None)  # of a Loader or a stream
    return isinstance(collate, pad_to) and collate.has_choice


class _StepAdapter:
    """The adapter of a Loader or `Steps`, which make a batch from the number of its step. Its position is this number."""

    def __init__(self, batches: Loader | Steps):
        self.name = f"the {type(batches).__name__}"
        self.given = self._batches = batches
        self._start = 0
        self.workers = batches.workers.count
        self.batch_sizes: Sequence[int] = batches.batch_sizes

    def fingerprint(self) -> dict[str, Any]:
        return self._batches.fingerprint()

    def restore(self, step: int, position: Any) -> None:
        try:
            steps: float = len(self._batches)
        except (TypeError, OverflowError):
            steps = math.inf
        if step > steps:
            raise ValueError(
                f"the state is at step {step:,}, past the {steps:,} steps of this {type(self._batches).__name__}: raise its "
                f"{'epochs' if isinstance(self._batches, Loader) else 'length'}"
            )
        self._start = step

    def read_for(self, shardings: Sequence[Sharding]) -> Rows | None:
        if not isinstance(self._batches, Loader):
            return None
        self._batches, rows = self._batches.for_shardings(shardings)
        return rows

    def producers(self, clocks: Sequence[Clock]) -> Producers:
        return self._batches.producers(self._start, clocks)

    def split(self, item: Batch) -> Produced:
        return Produced(item, None)


# Iterators that were fed. A second feed would miss the batches that the first one had read ahead. Iterators without weak
# references (map, zip, enumerate, iterators of lists) would be kept alive by the deque, so it holds only the last few of them.
_fed: weakref.WeakSet[Any] = weakref.WeakSet()
_fed_without_weakref: deque[Any] = deque(maxlen=8)


class _IterableAdapter:
    """The adapter of any iterable. It can be restored if it is a list, or its iterator has `get_state` and `set_state`."""

    workers = 1
    batch_sizes: Sequence[int] = ()

    def __init__(self, batches: Any):
        self.name = type(batches).__name__
        self.given = batches
        self._copy = may_change(batches)
        self._iterator: Any = None
        self._start = 0
        self._is_iterator = isinstance(batches, Iterator)
        self._is_list = isinstance(batches, (list, tuple))
        self._has_state = self._restored = False
        if self._is_used() and not _has_state(batches):
            raise ValueError(self._used_message())

    def _is_used(self) -> bool:
        return self._is_iterator and _was_used(self.given)

    def _used_message(self) -> str:
        return (
            f"this {self.name} was started or fed before, so batches of it are gone (a feed reads ahead): make a new one "
            "for each feed" + ("; or restore() this feed to a saved state" if _has_state(self.given) else "")
        )

    def _claim(self, iterator: Any) -> None:
        """Mark an iterator as used; raise ValueError if it was used before and `restore` has not set its position."""
        if _was_used(iterator) and not self._restored:
            raise ValueError(self._used_message())
        mark_as_used(iterator)

    def fingerprint(self) -> dict[str, Any]:
        length = length_of(self.given)
        return {"source": self.name} if length is None else {"source": self.name, "length": length}

    def restore(self, step: int, position: Any) -> None:
        if step == 0 and position is None and not self._is_used():
            return  # the state of a feed that had not begun
        if self._is_list:
            self._iterator = iter(self.given[step:])
            self._start = step
            return
        iterator = self._open()
        if position is None or not _has_state(iterator):
            raise TypeError(f"{self._no_state()}, or an iterable that starts at batch {step}")
        iterator.set_state(decode_state(position))
        self._restored = True
        self._start = step

    def read_for(self, shardings: Sequence[Sharding]) -> Rows | None:
        return None

    def _no_state(self) -> str:
        records = getattr(self.given, "dataset", None)  # of a torch DataLoader
        loader = f"ps.Loader of its {type(records).__name__}" if hasattr(records, "__len__") else "a Loader"
        return (
            f"a feed of {self.name} cannot be restored: it has no state to go back to. Feed {loader}, a Grain dataset, a list, "
            "or ps.stream(records, batch_size) of an iterable of records with state_dict and load_state_dict"
        )

    def producers(self, clocks: Sequence[Clock]) -> Producers:
        if self._is_iterator:
            self._claim(self.given)
        (clock,) = clocks

        def work(number: int) -> Produced:
            with clock.time("iterate"):
                try:
                    return self._next()
                except StopIteration:
                    raise Exhausted from None
                except Exception as error:
                    error.add_note(f"penstock: while {self.name} made batch {self._start + number}")
                    raise

        return Producers([work], cleanup=self._close)

    def _next(self) -> Produced:
        iterator = self._open()
        batch = to_arrays(next(iterator), self._copy)
        if self._is_list:
            return Produced(batch, None)
        return Produced(batch, encode_state(iterator.get_state()) if self._has_state else NoPosition(self._no_state()))

    def split(self, item: Produced) -> Produced:
        return item

    def _open(self) -> Any:
        if self._iterator is None:
            self._iterator = iterate(self.given)
            if not self._is_iterator and isinstance(self._iterator, types.GeneratorType):
                self._claim(self._iterator)  # the iterable may return the same generator each time, also to another feed
            self._has_state = _has_state(self._iterator)
        return self._iterator

    def _close(self) -> None:
        """Close the iterator on the thread that ran it, so that generators run their `finally` and loaders end their workers."""
        iterator, self._iterator, self.given = self._iterator, None, None
        close = getattr(iterator, "close", None)
        if callable(close) and (isinstance(iterator, types.GeneratorType) or not self._is_iterator):
            close()


def length_of(batches: Any) -> int | None:
    """Return the length of an iterable; None if it has none.

    Python, torch (for an `IterableDataset`) and TensorFlow (for an infinite or unknown cardinality) raise TypeError if there is
    no length. Abstract datasets raise NotImplementedError. Any other error belongs to the iterable, and is raised.
    """
    try:
        return len(batches)
    except (TypeError, NotImplementedError):
        return None


def may_change(batches: Any) -> bool:
    """Return whether an iterable may write to an array after it has yielded it, so that reading ahead needs copies.

    An iterable may fill the same buffer for each batch, which works in a loop that does not read ahead. The items of a list or
    tuple stay as they are, and TensorFlow never writes to the arrays that it yields.
    """
    return not isinstance(batches, (list, tuple)) and type(batches).__module__.partition(".")[0] != "tensorflow"


def iterate(batches: Any) -> Iterator[Any]:
    """Return an iterator over the batches, as NumPy arrays if the iterable offers them."""
    numpy_iterator = getattr(batches, "as_numpy_iterator", None)  # of tf.data
    return numpy_iterator() if numpy_iterator else iter(batches)


def _has_state(iterator: Any) -> bool:
    return hasattr(iterator, "get_state") and hasattr(iterator, "set_state")


def _was_used(iterator: Any) -> bool:
    """Return whether an iterator was started or fed."""
    if isinstance(iterator, types.GeneratorType) and inspect.getgeneratorstate(iterator) != inspect.GEN_CREATED:
        return True
    return iterator in _fed or any(iterator is fed for fed in _fed_without_weakref)


def mark_as_used(iterator: Any) -> None:
    """Refuse an iterator from now on. Batches that are read ahead of it are lost to any other reader."""
    try:
        _fed.add(iterator)
    except TypeError:
        _fed_without_weakref.append(iterator)
