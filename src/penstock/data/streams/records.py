"""Read records one after the other, from files or any iterable, with a position that can be saved.

A *cursor* reads the records of one epoch. Its position, which is a value for JSON, says where another cursor continues.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol

import jax
import numpy as np

from penstock.data.files import Files

CUT = "Was it cut short while it was written or copied? Copy it again, write it anew, or leave it out"
_IN_TURN = 8  # files that a shuffled stream reads in turn


class Raw(NamedTuple):
    """A record before it is decoded: its bytes, or the parts that its format makes of them, and its place for errors."""

    data: Any
    place: str


class Cursor(Protocol):
    """An iterator of the records of one epoch."""

    def __next__(self) -> Raw:
        """Return the next record."""

    def position(self) -> Any:
        """Return the position after the last record, for JSON. A cursor that begins there gives the records after it."""

    def close(self) -> None:
        """Close the files."""


class Records(Protocol):
    """Records that can be read from the beginning of an epoch, or from a position.

    Attributes:
      restorable: whether positions can be saved.
      repeats: whether a second epoch can begin.
    """

    restorable: bool
    repeats: bool

    def describe(self) -> str:
        """Return a text that differs from the text of other records."""

    def cursor(self, position: Any, epoch: int, seed: int | None, share: tuple[int, int]) -> Cursor:
        """Begin to read.

        Args:
          position: of an earlier cursor with the same other arguments; None for the beginning.
          epoch: number of the epoch.
          seed: of the order of the files; None for the order in which they were given.
          share: (index, count): the part of the files to read.
        """

    def decode(self, raw: Raw) -> Any:
        """Return the record. Raise ValueError, which names its place, if it is damaged."""


class FileRecords:
    """The records of files of one format. A subclass reads one file, and decodes a record."""

    form = ""  # name of the format
    restorable = repeats = True

    def __init__(self, files: Files):
        self.files = files

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.files.describe()})"

    def describe(self) -> str:
        """Return the format, and the number, size and version of the files."""
        return f"{self.form} in {self.files.describe()}"

    def cursor(self, position: Any, epoch: int, seed: int | None, share: tuple[int, int]) -> Cursor:
        """Begin to read one share of the files, the same in all epochs, in an order of the epoch if there is a seed."""
        mine = np.arange(len(self.files))[share[0] :: share[1]]
        if seed is not None:
            mine = np.random.default_rng([seed, epoch]).permutation(mine)
        return FileCursor(self.files, self, mine.tolist(), 1 if seed is None else _IN_TURN, position)

    def records(self, path: str, name: str, position: Any) -> Iterator[tuple[Raw, Any]]:
        """Yield the records of a file after a position, each with the position after it."""
        raise NotImplementedError

    def decode(self, raw: Raw) -> Any:
        """Return the record. Raise ValueError, which names its place, if it is damaged."""
        raise NotImplementedError


class FileCursor:
    """A cursor over the records of files. With more than one file at a time, it takes one record of each in turn.

    Args:
      files: all files.
      form: reads one of them.
      order: numbers of the files to read.
      width: how many files to read at a time.
      position: of an earlier cursor; None for the beginning.
    """

    def __init__(self, files: Files, form: FileRecords, order: Sequence[int], width: int, position: Any):
        self._files, self._format, self._order = files, form, order
        saved = position or {"next": 0, "turn": 0, "open": []}
        self._next, self._turn = saved["next"], saved["turn"]
        for index in order[self._next : width]:
            files.prefetch(index)
        self._open = [_OpenFile(files, form, order[at], at, inner) for at, inner in saved["open"]]
        while position is None and self._next < min(width, len(order)):
            self._open.append(self._open_next())

    def __next__(self) -> Raw:
        while self._open:
            self._turn %= len(self._open)
            try:
                raw = next(self._open[self._turn])
            except StopIteration:
                self._open[self._turn].close()
                self._open[self._turn : self._turn + 1] = [self._open_next()] if self._next < len(self._order) else []
                continue
            self._turn += 1
            return raw
        raise StopIteration

    def _open_next(self) -> _OpenFile:
        at = self._next
        opened = _OpenFile(self._files, self._format, self._order[at], at, None)
        self._next += 1
        if self._next < len(self._order):
            self._files.prefetch(self._order[self._next])
        return opened

    def position(self) -> Any:
        """Return the number of files that were opened, the file to read next, and the position inside of each open file."""
        return {"next": self._next, "turn": self._turn, "open": [[file.at, file.position] for file in self._open]}

    def close(self) -> None:
        for file in self._open:
            file.close()


class _OpenFile:
    """A file that is being read, at a place in the order of the files, with the position after its last record."""

    def __init__(self, files: Files, form: FileRecords, index: int, at: int, position: Any):
        self.at, self.position = at, position
        self._stack = contextlib.ExitStack()
        path = self._stack.enter_context(files.using(index))
        self._records = form.records(path, files.names[index], position)

    def __next__(self) -> Raw:
        raw, self.position = next(self._records)
        return raw

    def close(self) -> None:
        self._records.close()  # type: ignore[attr-defined]  # each format's `records` is a generator
        self._stack.close()


def open_file(path: str, name: str) -> BinaryIO:
    """Open a file that may be compressed by gzip, which its first bytes say. Raise ValueError for other compressions."""
    with open(path, "rb") as file:
        start = file.read(6)
    if start.startswith(b"\x1f\x8b"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    for magic, kind in ((b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh", "bzip2"), (b"\xfd7zXZ\0", "xz")):
        if start.startswith(magic):
            raise ValueError(f"{name} is compressed with {kind}, which is not supported: compress it with gzip, or not at all")
    return open(path, "rb")


class damaged:  # noqa: N801 - a context manager, used like a function
    """A context manager that replaces an error about damaged compressed data by a ValueError that names the file and place."""

    def __init__(self, name: str):
        self._name = name
        self.place = "at its beginning"  # where the last good record ends; set by the reader

    def __enter__(self) -> damaged:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, (EOFError, gzip.BadGzipFile, zlib.error)):
            raise ValueError(f"{self._name} is damaged {self.place}: {error}. {CUT}") from error


def encode_state(state: Any) -> Any:
    """Return a state as a value for JSON: numbers of NumPy become numbers of Python, and bytes become text."""
    if not isinstance(state, bytes):
        return jax.tree.map(lambda x: x.item() if isinstance(x, np.generic) else x, copy.deepcopy(state))
    try:
        return {"utf8": state.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(state).decode()}


def decode_state(value: Any) -> Any:
    """Return the state that `encode_state` has converted."""
    if isinstance(value, dict) and value.keys() == {"utf8"}:
        return value["utf8"].encode()
    if isinstance(value, dict) and value.keys() == {"base64"}:
        return base64.b64decode(value["base64"])
    return value


def _state_methods(owner: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """Return the functions that get and set the state of an object; None if it has none."""
    for get, put in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        if hasattr(owner, get) and hasattr(owner, put):
            return getattr(owner, get), getattr(owner, put)
    return None


class IterableRecords:
    """The records of an iterable.

    Its iterator, or the iterable itself, may have `get_state` and `set_state`, or `state_dict` and `load_state_dict`, as the
    iterators of Grain and the `IterableDataset` of Hugging Face have.

    A Hugging Face data set with a shuffle buffer is refused, as its state does not contain the buffer.
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
        return encode_state(self._state[0]()) if self._state else None

    def close(self) -> None:
        if callable(close := getattr(self._iterator, "close", None)):  # a generator
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
