"""The items of an iterator by number, so that reading ahead of Keras can stop anywhere and lose nothing."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from penstock.keras._aligned import copied


class _Failed(NamedTuple):
    """In the place of an item that could not be made."""

    error: BaseException


class Replay:
    """Numbers the items that `read_next` gives, from 0, and keeps each from when it was read until it is forgotten.

    Who reads ahead may stop at any item; who goes on, on another thread, begins at the first that is not forgotten, and has
    what was read in the meantime. There may be several readers one after the other, but not at a time.

    *Threads.* One thread at a time is in `read_next`, which it may not leave for long; another that wants an item waits for
    it and finds the item kept. So a thread that was told to stop while it read has read for its successor. `forget` takes
    no lock: it is called by the one consumer, for numbers that it had, which nobody asks for again; reading changes
    `_made` and adds, forgetting changes `first` and removes, each a single operation on a dict.

    Args:
      read_next: the next item, or StopIteration; not called again after it has raised anything.
      copy: items are pytrees whose NumPy arrays whoever made them may write to again, such as one buffer that is
        filled again and again.

    Attributes:
      first: number of the first item that was not forgotten.
    """

    def __init__(self, read_next: Callable[[], Any], copy: bool):
        self._read_next, self._copy = read_next, copy
        self._reading = threading.Lock()
        self._kept: dict[int, Any] = {}
        self._made = 0
        self._ended = False
        self.first = 0

    def read(self, number: int) -> Any:
        """The item of that number, which was not forgotten.

        Raises:
          StopIteration: there is no such item.
          BaseException: what the iterator raised in its place.
        """
        with self._reading:
            while self._made <= number and not self._ended:
                self._make()
        if number >= self._made:
            raise StopIteration
        item = self._kept[number]
        if not isinstance(item, _Failed):
            return item
        try:
            raise item.error
        finally:
            del item  # or its traceback would hold this frame, and this frame it

    def _make(self) -> None:
        try:
            item = self._read_next()
            self._kept[self._made] = copied(item) if self._copy else item
        except StopIteration:
            self._ended = True
            return
        except BaseException as error:
            self._ended = True
            self._kept[self._made] = _Failed(error)
        self._made += 1

    def pop(self) -> Any:
        """The first item that is not forgotten, which then is. It is copied only if it was kept. Raises what `read` raises."""
        with self._reading:
            if not self._kept and not self._ended:
                try:
                    item = self._read_next()
                except BaseException:
                    self._ended = True
                    raise
                self._made = self.first = self._made + 1
                return item
        try:
            return self.read(self.first)
        finally:
            self.forget(self.first + 1)

    def forget(self, number: int) -> None:
        """Drop the items before that number."""
        for had in range(self.first, number):
            self._kept.pop(had, None)
        self.first = max(self.first, number)

    def __iter__(self) -> Iterator[Any]:
        """The items from the first one on that is not forgotten, which stay until they are."""
        for number in itertools.count(self.first):
            try:
                item = self.read(number)
            except StopIteration:
                return
            yield item


def opening(open_iterable: Callable[[], Iterable[Any]]) -> Callable[[], Any]:
    """A `read_next` for what is opened when its first item is asked for, on the thread that asks."""
    iterator: Iterator[Any] | None = None

    def read_next() -> Any:
        nonlocal iterator
        if iterator is None:
            iterator = iter(open_iterable())
        return next(iterator)

    return read_next


# What was read of iterators ahead of Keras, for as long as they live.
_replays: weakref.WeakKeyDictionary[Iterator[Any], Replay] = weakref.WeakKeyDictionary()


def replay_of(iterator: Iterator[Any], copy: bool = True) -> Replay:
    """The one Replay of an iterator, which keeps what an earlier reader read of it and did not need.

    It does not keep the iterator alive.

    Raises:
      TypeError: an iterator of which there are no weak references.
    """
    if iterator not in _replays:
        weak = weakref.ref(iterator)

        def read_next() -> Any:
            alive = weak()
            if alive is None:
                raise StopIteration
            return next(alive)

        _replays[iterator] = Replay(read_next, copy)
    return _replays[iterator]


def is_replayed(iterator: Iterator[Any]) -> bool:
    """Whether it has a Replay."""
    try:
        return iterator in _replays
    except TypeError:
        return False
