"""What a feed is fed from: a Loader, or any iterable of batches."""

from __future__ import annotations

import copy
import inspect
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from penstock._clock import Clock
from penstock._makers import End, Makers
from penstock.data.loader import Loader
from penstock.data.tree import Batch, to_numpy


class Produced(NamedTuple):
    """A host batch, and where its upstream stood after it: None where the number of batches says it all."""

    batch: Batch
    position: Any


class Upstream(Protocol):
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
        """Go to where `step` batches were had; before `makers`. TypeError if it cannot be moved."""
        ...

    def makers(self, clocks: Sequence[Clock]) -> Makers:
        """What makes its batches ahead of time, with one clock for each worker."""
        ...

    def split(self, item: Any) -> Produced:
        """A made item as batch and position."""
        ...


def as_upstream(batches: Any) -> Upstream:
    """Wrap what can be fed.

    Raises:
      TypeError: no iterable of batches.
      ValueError: a generator or other iterator that was fed before, or that has been started or used up.
    """
    if isinstance(batches, Loader):
        return _LoaderUpstream(batches)
    if isinstance(batches, (str, bytes, Mapping, np.ndarray, jax.Array)) or not isinstance(batches, Iterable):
        raise TypeError(
            f"feed needs an iterable of batches, got {type(batches).__name__}: for arrays of records, "
            "ps.feed(ps.Loader(arrays, batch_size=...)); for a single batch, ps.feed([batch])"
        )
    return _IterableUpstream(batches)


class _LoaderUpstream:
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

    def makers(self, clocks: Sequence[Clock]) -> Makers:
        return self._loader.makers(self._start, clocks)

    def split(self, item: Batch) -> Produced:
        return Produced(item, None)


# Batches of these are new memory each time; other iterables may fill one buffer again and again, which is
# fine in a loop that does not read ahead, so their batches are copied.
_MAKES_NEW_BATCHES = ("grain", "torch", "tensorflow")

# Iterators that were fed: what their feed had read ahead is lost to a second one.
_fed: weakref.WeakSet[Any] = weakref.WeakSet()


class _IterableUpstream:
    """Any iterable. One whose iterator has `get_state` and `set_state`, as Grain's have, can be restored."""

    workers = 1
    batch_sizes: Sequence[int] = ()

    def __init__(self, batches: Any):
        self.name = type(batches).__name__
        self._batches = batches
        self._copy = not isinstance(batches, (list, tuple)) and not _is_from(batches, _MAKES_NEW_BATCHES)
        self._iterator: Any = None
        self._start = 0
        self._is_iterator = isinstance(batches, Iterator)
        self._needs_restore = self._is_iterator and _was_used(batches)
        if self._needs_restore and not _has_state(batches):
            raise ValueError(self._used())

    def _used(self) -> str:
        return (
            f"this {self.name} was started or fed before, so batches of it are gone (a feed reads ahead): make a new one "
            "for each feed" + ("; or restore() this feed to a saved state" if _has_state(self._batches) else "")
        )

    def fingerprint(self) -> dict[str, Any]:
        return {"source": self.name}

    def restore(self, step: int, position: Any) -> None:
        iterator = self._open()
        if position is None or not _has_state(iterator):
            raise TypeError(
                f"a feed of {self.name} cannot be restored: it has no state to go back to. Feed a Loader or a Grain dataset, "
                f"or an iterable that starts at batch {step}, such as itertools.islice(batches, {step}, None)"
            )
        iterator.set_state(position["utf8"].encode() if position.keys() == {"utf8"} else position)
        self._needs_restore = False
        self._start = step

    def makers(self, clocks: Sequence[Clock]) -> Makers:
        if self._needs_restore:
            raise ValueError(self._used())
        (clock,) = clocks

        def work(number: int) -> Produced:
            with clock.time("iterate"):
                try:
                    return self._next()
                except StopIteration:
                    raise End from None
                except Exception as error:
                    error.add_note(f"penstock: while {self.name} made batch {self._start + number}")
                    raise

        return Makers([work], cleanup=self._close)

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
            numpy_iterator = getattr(self._batches, "as_numpy_iterator", None)  # of tf.data
            self._iterator = numpy_iterator() if numpy_iterator else iter(self._batches)
            self._has_state = _has_state(self._iterator)
        return self._iterator

    def _host_leaf(self, leaf: Any) -> Any:
        array = to_numpy(leaf)
        return array.copy() if self._copy and isinstance(array, np.ndarray) else array

    def _close(self) -> None:
        """End the iterator on the thread that ran it: generators run their `finally`, loaders end their workers."""
        iterator, self._iterator, self._batches = self._iterator, None, None
        close = getattr(iterator, "close", None)
        if callable(close) and (isinstance(iterator, types.GeneratorType) or not self._is_iterator):
            close()


def _is_from(value: Any, packages: Sequence[str]) -> bool:
    return any(kind.__module__.partition(".")[0] in packages for kind in type(value).__mro__)


def _has_state(iterator: Any) -> bool:
    return hasattr(iterator, "get_state") and hasattr(iterator, "set_state")


def _position(iterator: Any) -> Any:
    """The iterator's own state as something that JSON holds."""
    state = iterator.get_state()
    return {"utf8": state.decode()} if isinstance(state, bytes) else copy.deepcopy(state)


def _was_used(iterator: Any) -> bool:
    """Whether it has been started or fed; it counts as fed from now on."""
    if isinstance(iterator, types.GeneratorType) and inspect.getgeneratorstate(iterator) != inspect.GEN_CREATED:
        return True
    try:
        used = iterator in _fed
        _fed.add(iterator)
    except TypeError:  # map, zip and the like can be neither hashed by us nor told apart when they are gone
        return False
    return used
