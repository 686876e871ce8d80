"""Records that are read one by one, or a list of them at a time."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.data.tree import Record


class RecordSource:
    """Anything with `__len__` and `__getitem__`, or `__getitems__`, which is preferred: it takes a list of
    indices and returns a list of records (the protocol of torch, Grain, TFDS and Hugging Face sources).
    """

    def __init__(self, records: Any, name: str | None = None):
        if len(records) == 0:
            raise ValueError(f"no records: {type(records).__name__} of length 0")
        self._records = records
        self._name = name or type(records).__name__
        self.batched = hasattr(records, "__getitems__")

    def __len__(self) -> int:
        return len(self._records)

    def read(self, indices: np.ndarray) -> list[Record]:
        if self.batched:
            records = list(self._records.__getitems__(indices.tolist()))
            if len(records) != len(indices):
                raise ValueError(f"{self._name}.__getitems__ returned {len(records)} records for {len(indices)} indices")
            return records
        return [self._read_one(i) for i in indices.tolist()]

    def _read_one(self, index: int) -> Record:
        try:
            return self._records[index]
        except Exception as error:
            error.add_note(f"penstock: while reading record {index} of {self._name}")
            raise

    def describe(self) -> str:
        return self._name


def array_record(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> RecordSource:
    """ArrayRecord files as a source of `bytes`; decode them with `transform=ps.per_record(decode)`.

    Reads go through the library's own batched, parallel `__getitems__`. Written with `group_size:1`,
    as Grain asks for too, random access is fastest.

    Raises:
      FileNotFoundError: no file at a path or pattern.
      ValueError: a file that is truncated or not ArrayRecord.
    """
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    files = expand(paths)
    try:
        records = ArrayRecordDataSource(files)  # opens all of them, side by side
    except RuntimeError:
        _open_each(ArrayRecordDataSource, files)  # the library does not say which one it was, nor always why
        raise
    return RecordSource(records, name="ArrayRecord")


def _open_each(opener: Callable[[list[str]], Any], files: list[str]) -> None:
    for file in files:
        try:
            opener([file])
        except RuntimeError as error:
            raise ValueError(
                f"{file!r} ({os.path.getsize(file):,} bytes) is no complete ArrayRecord file"
                f"{f': {error}' if str(error) else ''}. Was it cut short while it was written or copied?"
            ) from error


def expand(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """Paths and glob patterns as a list of files that exist, each pattern's in order of name."""
    given = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    files: list[str] = []
    for path in [os.fspath(path) for path in given]:
        found = [path] if os.path.exists(path) else sorted(glob.glob(path))
        if not found:
            raise FileNotFoundError(f"no such file: {path!r} (relative to {os.getcwd()!r})")
        files += found
    return files
