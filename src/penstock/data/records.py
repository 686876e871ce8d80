"""Read records from objects that return one record, or a list of records, at a time."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.data.array_pickling import from_picklable, to_picklable
from penstock.data.remote.files import RemoteFiles, RemoteSource, as_remote
from penstock.data.tree import Record


class RecordSource:
    """A source over any object with `__len__`, and `__getitem__` or `__getitems__`.

    `__getitems__` is preferred: it takes a list of indices and returns a list of records, as the sources of torch, Grain, TFDS
    and Hugging Face do.

    Args:
      records: the object.
      name: its name in errors and fingerprints; None for the name of its class.

    Attributes:
      records: the object.
      batched: whether it has `__getitems__`.

    Raises:
      ValueError: it has no records.
    """

    def __init__(self, records: Any, name: str | None = None):
        if len(records) == 0:
            raise ValueError(f"no records: {type(records).__name__} of length 0")
        self.records = records
        self._name = name or type(records).__name__
        self.batched = hasattr(records, "__getitems__")

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.records)

    def read(self, indices: np.ndarray) -> list[Record]:
        """Return the records at int64 [n]."""
        if self.batched:
            records = list(self.records.__getitems__(indices.tolist()))
            if len(records) != len(indices):
                raise ValueError(f"{self._name}.__getitems__ returned {len(records)} records for {len(indices)} indices")
            return records
        return [self._read_one(i) for i in indices.tolist()]

    def _read_one(self, index: int) -> Record:
        try:
            return self.records[index]
        except Exception as error:
            error.add_note(f"penstock: while reading record {index} of {self._name}")
            raise

    def describe(self) -> str:
        """Return the name."""
        return self._name

    def __getstate__(self) -> dict[str, Any]:
        records = self.records
        holds_memmaps = isinstance(records, list) and any(isinstance(record, np.memmap) for record in records)
        return self.__dict__ | {"records": to_picklable(records) if holds_memmaps else records}

    def __setstate__(self, state: dict[str, Any]) -> None:
        records = state["records"]
        self.__dict__ = state | {"records": from_picklable(records) if isinstance(records, list) else records}


def array_record(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | RemoteFiles) -> RecordSource | RemoteSource:
    """Open ArrayRecord files as a source of `bytes`, to be decoded with `transform=ps.per_record(decode)`.

    The library's own parallel `__getitems__` reads the records of a batch. Random access is fastest in files that were written
    with `group_size:1`, which Grain recommends too.

    Args:
      paths: files, URLs or glob patterns, or the result of `ps.remote`; the records are in this order.

    Returns:
      A source, for `ps.Loader`.

    Raises:
      FileNotFoundError: there is no file at a path or pattern.
      ValueError: a file is truncated or not ArrayRecord.
    """
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    if (remote := as_remote(paths)) is not None:
        return RemoteSource(remote, array_record)
    files = expand(paths)
    try:
        records = ArrayRecordDataSource(files)  # opens all files in parallel
    except RuntimeError:
        for file in files:  # the library does not name the file, and does not always give the reason
            try:
                ArrayRecordDataSource([file])
            except RuntimeError as error:
                raise ValueError(
                    f"{file!r} ({os.path.getsize(file):,} bytes) is not a complete ArrayRecord file"
                    f"{f': {error}' if str(error) else ''}. Was it cut short while it was written or copied?"
                ) from error
        raise
    return RecordSource(records, name="ArrayRecord")


def expand(paths: Any) -> list[str]:
    """Expand paths and glob patterns to existing files. The files of a pattern are sorted by name.

    In a pattern, "**" stands for any number of folders, as in `glob` with `recursive=True`. "~" is the folder of the user.

    Raises:
      FileNotFoundError: there is no file at a path or pattern.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    files: list[str] = []
    for path in [os.path.expanduser(os.fspath(path)) for path in given]:
        found = [path] if os.path.exists(path) else sorted(set(glob.glob(path, recursive=True)))  # "**/**" finds files twice
        if "**" in path:  # which finds the folders on the way too
            found = [each for each in found if not os.path.isdir(each)]
        if not found:
            raise FileNotFoundError(f"no such file or folder: {path!r} (relative to {os.getcwd()!r}). Check the path or pattern")
        files += found
    return files
