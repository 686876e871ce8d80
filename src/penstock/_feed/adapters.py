"""What a feed is fed from: a Loader, or any iterable of batches."""

from __future__ import annotations

import base64
import copy
import inspect
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from penstock._clock import Clock
from penstock._producers import Exhausted, Producers
from penstock.data.loader import Loader
from penstock.data.tree import Batch, to_numpy


class Produced(NamedTuple):
    """A host batch, and where its upstream stood after it: None where the number of batches says it all."""

    batch: Batch
    position: Any


class BatchAdapter(Protocol):
    """A run of host batches.

    Attributes:
      name: what errors call it.
      workers: threads or processes that make batches.
      batch_sizes: records in its global batches; empty where that is not known.
    """

    name: str
    workers: int
    batch_sizes: Sequence[int]

    def fingerprint(self) -> dict[str, Any]:
        """What it must have in common with another for a saved state of one to fit the other."""
        ...

    def restore(self, step: int, position: Any) -> None:
        """Go to where `step` batches were had; before `producers`. TypeError if it cannot be moved."""
        ...

    def producers(self, clocks: Sequence[Clock]) -> Producers:
        """What makes its batches ahead of time, with one clock for each worker."""
        ...

    def split(self, item: Any) -> Produced:
        """A made item as batch and position."""
        ...


def adapt(batches: Any) -> BatchAdapter:
    """Wrap what can be fed.

    Raises:
      TypeError: no iterable of batches.
      ValueError: a generator or other iterator that was fed before, or that has been started or used up.
    """
    if isinstance(batches, Loader):
        return _LoaderAdapter(batches)
    if isinstance(batches, (str, bytes, Mapping)) or _is_data(batches) or not isinstance(batches, Iterable):
        raise TypeError(
            f"feed needs an iterable of batches, got {_describe(batches)}: for arrays of records, "
            "ps.feed(ps.Loader(arrays, batch_size=...)); for a single batch, ps.feed([batch])"
        )
    return _IterableAdapter(batches)


def _is_data(batches: Any) -> bool:
    """Whether it is records, which iterate as something else: an array, a table, or a tuple (inputs, labels)."""
    if isinstance(batches, tuple) and all(hasattr(part, "shape") and hasattr(part, "dtype") for part in batches):
        return len({part.shape[:1] for part in batches}) == 1 and len({(part.shape, part.dtype) for part in batches}) > 1
    return hasattr(batches, "dtype") or type(batches).__module__.partition(".")[0] in ("pandas", "polars", "pyarrow")


def _describe(batches: Any) -> str:
    parts = f" of {', '.join(type(part).__name__ for part in batches)}" if isinstance(batches, tuple) else ""
    return type(batches).__name__ + parts


class _LoaderAdapter:
    name = "the Loader"

    def __init__(self, loader: Loader):
        self._loader = loader
        self._start = 0
        self.workers = loader.workers.count
        self.batch_sizes: Sequence[int] = loader.batch_sizes

    def fingerprint(self) -> dict[str, Any]:
        return self._loader.fingerprint()

    def restore(self, step: int, position: Any) -> None:
        if self._loader.epochs is not None and step > len(self._loader):
            raise ValueError(
                f"the state is at step {step:,}, past the {len(self._loader):,} steps of this Loader: raise its epochs"
            )
        self._start = step

    def producers(self, clocks: Sequence[Clock]) -> Producers:
        return self._loader.producers(self._start, clocks)

    def split(self, item: Batch) -> Produced:
        return Produced(item, None)


# Iterators that were fed: what their feed had read ahead is lost to a second one. Those that take no weak references
# (map, zip, enumerate, of lists) are kept alive, so only a few of the last.
_fed: weakref.WeakSet[Any] = weakref.WeakSet()
_fed_lately: deque[Any] = deque(maxlen=8)


class _IterableAdapter:
    """Any iterable. One whose iterator has `get_state` and `set_state`, as Grain's have, can be restored."""

    workers = 1
    batch_sizes: Sequence[int] = ()

    def __init__(self, batches: Any):
        self.name = type(batches).__name__
        self._batches = batches
        self._copy = may_change(batches)
        self._iterator: Any = None
        self._start = 0
        self._is_iterator = isinstance(batches, Iterator)
        self._restored = False
        if self._is_used() and not _has_state(batches):
            raise ValueError(self._used())

    def _is_used(self) -> bool:
        return self._is_iterator and _was_used(self._batches)

    def _used(self) -> str:
        return (
            f"this {self.name} was started or fed before, so batches of it are gone (a feed reads ahead): make a new one "
            "for each feed" + ("; or restore() this feed to a saved state" if _has_state(self._batches) else "")
        )

    def _claim(self, iterator: Any) -> None:
        """Begin with an iterator; ValueError if it was begun before, and not set back by `restore`."""
        if _was_used(iterator) and not self._restored:
            raise ValueError(self._used())
        mark_as_used(iterator)

    def fingerprint(self) -> dict[str, Any]:
        length = length_of(self._batches)
        return {"source": self.name} if length is None else {"source": self.name, "length": length}

    def restore(self, step: int, position: Any) -> None:
        if step == 0 and position is None and not self._is_used():
            return  # of a feed that had not begun
        iterator = self._open()
        if position is None or not _has_state(iterator):
            raise TypeError(
                f"a feed of {self.name} cannot be restored: it has no state to go back to. Feed a Loader or a Grain dataset, "
                f"or an iterable that starts at batch {step}, such as itertools.islice(batches, {step}, None)"
            )
        iterator.set_state(_from_json(position))
        self._restored = True
        self._start = step

    def producers(self, clocks: Sequence[Clock]) -> Producers:
        if self._is_iterator:
            self._claim(self._batches)
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
        batch = next(iterator)
        if self._copy or not all(type(leaf) is np.ndarray for leaf in jax.tree_util.tree_leaves(batch)):
            batch = jax.tree.map(self._host_leaf, batch)
        return Produced(batch, _position(iterator) if self._has_state else None)

    def split(self, item: Produced) -> Produced:
        return item

    def _open(self) -> Any:
        if self._iterator is None:
            self._iterator = iterate(self._batches)
            if not self._is_iterator and isinstance(self._iterator, types.GeneratorType):
                self._claim(self._iterator)  # which the iterable may keep, and have given to another feed
            self._has_state = _has_state(self._iterator)
        return self._iterator

    def _host_leaf(self, leaf: Any) -> Any:
        array = to_numpy(leaf)
        if isinstance(array, np.ndarray) and array.dtype == object and not isinstance(leaf, np.ndarray):
            raise TypeError(
                f"a batch holds {type(leaf).__name__}, which is neither an array nor a pytree of arrays: turn it into numbers, "
                "or register its class with jax.tree_util.register_dataclass"
            )
        return array.copy() if self._copy and isinstance(array, np.ndarray) else array

    def _close(self) -> None:
        """End the iterator on the thread that ran it: generators run their `finally`, loaders end their workers."""
        iterator, self._iterator, self._batches = self._iterator, None, None
        close = getattr(iterator, "close", None)
        if callable(close) and (isinstance(iterator, types.GeneratorType) or not self._is_iterator):
            close()


def length_of(batches: Any) -> int | None:
    """Return how many batches an iterable says that it has; None where it has no length.

    TypeError is how Python, torch (an `IterableDataset`) and TensorFlow (an endless or unknown cardinality) say that there is
    none, and NotImplementedError how abstract datasets do. Any other error is one of the iterable's own, and is raised.
    """
    try:
        return len(batches)
    except (TypeError, NotImplementedError):
        return None


def may_change(batches: Any) -> bool:
    """Whether arrays may be written to after they were given, so that who reads ahead needs copies.

    An iterable may fill one buffer again and again, which is fine in a loop that does not read ahead. TensorFlow's are never
    written to.
    """
    return not isinstance(batches, (list, tuple)) and type(batches).__module__.partition(".")[0] != "tensorflow"


def iterate(batches: Any) -> Iterator[Any]:
    """An iterator of its batches, as NumPy arrays where it can give those."""
    numpy_iterator = getattr(batches, "as_numpy_iterator", None)  # of tf.data
    return numpy_iterator() if numpy_iterator else iter(batches)


def _has_state(iterator: Any) -> bool:
    return hasattr(iterator, "get_state") and hasattr(iterator, "set_state")


def _position(iterator: Any) -> Any:
    """The iterator's own state as something that JSON holds."""
    state = iterator.get_state()
    if not isinstance(state, bytes):
        return jax.tree.map(lambda x: x.item() if isinstance(x, np.generic) else x, copy.deepcopy(state))
    try:
        return {"utf8": state.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(state).decode()}


def _from_json(position: Any) -> Any:
    if isinstance(position, dict) and position.keys() == {"utf8"}:
        return position["utf8"].encode()
    if isinstance(position, dict) and position.keys() == {"base64"}:
        return base64.b64decode(position["base64"])
    return position


def _was_used(iterator: Any) -> bool:
    """Whether it has been started or fed."""
    if isinstance(iterator, types.GeneratorType) and inspect.getgeneratorstate(iterator) != inspect.GEN_CREATED:
        return True
    return iterator in _fed or any(iterator is fed for fed in _fed_lately)


def mark_as_used(iterator: Any) -> None:
    """Refuse it from now on: what is read of it ahead is lost to others."""
    try:
        _fed.add(iterator)
    except TypeError:
        _fed_lately.append(iterator)
