"""Any iterable of records goes in, `Records` come out. Its own state, if it has one, is the position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from penstock.data.streams.records import Cursor, Raw
from penstock.data.streams.state import decode_state, encode_state

_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


def _state_methods(owner: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """Return the functions that get and set the state of an object; None if it has none."""
    for get, put in _METHODS:
        if hasattr(owner, get) and hasattr(owner, put):
            return getattr(owner, get), getattr(owner, put)
    return None


class IterableRecords:
    """The records of an iterable.

    Its iterator, or the iterable itself, may have `get_state` and `set_state`, or `state_dict` and `load_state_dict`, as the
    iterators of Grain and the `IterableDataset` of Hugging Face have.

    Args:
      iterable: yields records.

    Raises:
      ValueError: the iterable is a Hugging Face data set with a shuffle buffer, whose state does not contain the buffer.
    """

    def __init__(self, iterable: Any):
        if (size := _shuffle_buffer(iterable)) > 1:
            raise ValueError(
                f"this {type(iterable).__name__} has a shuffle buffer of {size:,} records, which its state does not contain, so "
                "records would be lost: shuffle with ps.stream(..., shuffle=window), and give dataset.shuffle(buffer_size=1) to "
                "shuffle the order of its files"
            )
        self._iterable = iterable
        self._begun = False
        self.repeats = not isinstance(iterable, Iterator)
        self._of_iterable = _state_methods(iterable)
        begun = iterable if not self.repeats or self._of_iterable else iter(iterable)
        self.restorable = (self._of_iterable or _state_methods(begun)) is not None

    def describe(self) -> str:
        """Return the name of its class."""
        return type(self._iterable).__name__

    def cursor(self, position: Any, epoch: int, seed: int | None, share: tuple[int, int]) -> Cursor:
        """Begin to read, see `Records`. There are no files to share."""
        if not self.repeats and self._begun and position is None:
            raise ValueError(
                f"this {type(self._iterable).__name__} is an iterator that was read before, so its first records are gone: give "
                "the iterable itself, make a new one, or restore a saved state"
            )
        self._begun = True
        if hasattr(self._iterable, "set_epoch"):
            self._iterable.set_epoch(epoch)
        return _IterableCursor(self._iterable, self._of_iterable, position)

    def decode(self, raw: Raw) -> Any:
        """Return the record as it is."""
        return raw.data


class _IterableCursor:
    def __init__(self, iterable: Any, of_iterable: Any, position: Any):
        if position is not None and of_iterable:
            of_iterable[1](decode_state(position))
        self._iterator = iter(iterable)
        self._state = of_iterable or _state_methods(self._iterator)
        if position is not None and not of_iterable and self._state:
            self._state[1](decode_state(position))
        self._name, self._number = type(iterable).__name__, 0

    def __next__(self) -> Raw:
        self._number += 1
        return Raw(next(self._iterator), f"{self._name}, record {self._number} since it was opened")

    def position(self) -> Any:
        """Return the state of the iterable; None if it has none."""
        return encode_state(self._state[0]()) if self._state else None

    def close(self) -> None:
        """Close a generator."""
        close = getattr(self._iterator, "close", None)
        if callable(close):
            close()


def _shuffle_buffer(iterable: Any) -> int:
    """Return the size of the shuffle buffer of a Hugging Face `IterableDataset`; 0 if there is none."""
    inner = getattr(iterable, "_ex_iterable", None)
    size = 0
    while inner is not None:
        if type(inner).__name__.startswith("BufferShuffled"):
            size = max(size, getattr(inner, "buffer_size", 0))
        inner = getattr(inner, "ex_iterable", None)
    return size
