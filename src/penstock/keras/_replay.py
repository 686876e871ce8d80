"""Replay of an iterator: its items by number, so that reading ahead can stop at any item and nothing is lost.

An iterator goes in; `read(number)` comes out. Each item is read once, and kept until it is forgotten.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from penstock.keras._aligned import copied


class _Failed(NamedTuple):
    """The error in the place of an item."""

    error: BaseException


class Replay:
    """The items of an iterator, numbered from 0, each kept from when it was read until it is forgotten.

    A reader may stop at any item. The next reader, on another thread, begins at the first item that is not forgotten, and gets
    the items that were read in the meantime. There may be several readers one after the other, but not at the same time.

    *Threads.* One thread at a time is inside of `read_next`, and it may stay there for a long time. Another thread that needs an
    item waits for that thread, and then finds the item kept. So a reader that was stopped during a read has read for its
    successor. `forget` takes no lock: only the one consumer calls it, for numbers that it has consumed and that nobody reads
    again. Reading changes `_count` and adds items; forgetting changes `first` and removes items. Each is a single operation on a
    dict.

    Args:
      read_next: returns the next item or raises StopIteration. It is not called again after it has raised any error.
      copy: whether to copy the NumPy arrays of the items, because the iterator may write to them again, as to one buffer that it
        fills for each item.
      state: returns the position of the iterator, before each item; None if nobody asks for it.

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


# The replays of iterators, for as long as the iterators live.
_replays: weakref.WeakKeyDictionary[Iterator[Any], Replay] = weakref.WeakKeyDictionary()


def replay_of(iterator: Iterator[Any], copy: bool = True, state: Callable[[Any], Any] | None = None) -> Replay:
    """Return the one Replay of an iterator, which keeps items that an earlier reader read and did not consume.

    It does not keep the iterator alive.

    Args:
      iterator: the iterator.
      copy: see `Replay`.
      state: returns the position of the iterator that it is given.

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
