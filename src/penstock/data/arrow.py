"""Arrow tables, Arrow IPC and Parquet files, and Hugging Face datasets, read without per-record Python.

A column whose rows all have one size (numbers, fixed-size lists, lists that happen to be of equal length,
nested lists of these) is used in place: its chunks are viewed as NumPy arrays [rows, ...], wherever they lie,
and a batch is one gather. A ragged list column gives one view a record, for `ps.pad_to`. Everything else
(strings, bytes, structs) comes as Python objects, for `ps.per_record`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from penstock.data.records import expand
from penstock.data.tree import Batch, Record

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class ArrowSource:
    """A `pyarrow.Table`: one batch leaf a column, named after it.

    Args:
      table: the records. A memory-mapped one stays on disk.
      rows: int64 [N]; which rows of the table are the records, all if None.

    Raises:
      ValueError: no rows, or nulls in a column of numbers or lists.
    """

    def __init__(self, table: pa.Table, rows: np.ndarray | None = None):
        self._table = table if isinstance(table, pa.Table) else pa.table(table)
        self._rows = rows
        if len(self) == 0:
            raise ValueError(f"no records: a table of 0 rows with columns {self._table.column_names}")
        self._columns = {name: _column(name, self._table[name]) for name in self._table.column_names}

    def __len__(self) -> int:
        return self._table.num_rows if self._rows is None else len(self._rows)

    def read(self, indices: np.ndarray) -> Batch | list[Record]:
        if self._rows is not None:
            indices = self._rows.take(indices)
        columns = {name: column.take(indices) for name, column in self._columns.items()}
        if all(isinstance(column, np.ndarray) for column in columns.values()):
            return columns
        return [dict(zip(columns, record, strict=True)) for record in zip(*columns.values(), strict=True)]

    def describe(self) -> str:
        return ", ".join(f"{field.name}: {field.type}" for field in self._table.schema)

    def __reduce__(self) -> Any:
        return ArrowSource, (self._table, self._rows)


def parquet(paths: Paths, columns: Sequence[str] | None = None, cache: str | os.PathLike[str] | None = None) -> ArrowSource:
    """Parquet files as a source.

    Parquet is compressed, so its records cannot be read at random from disk: the chosen columns are decoded once.

    Args:
      paths: files or glob patterns; records follow in this order.
      columns: names of the columns to read, all if None.
      cache: None decodes into memory. A folder decodes into a memory-mapped Arrow IPC file there,
        one row group at a time, for data larger than memory; it is found again by the next run.

    Raises:
      FileNotFoundError: no file at a path or pattern.
      ValueError: a file that is truncated or not Parquet; an unknown column.
    """
    files = expand(paths)
    if cache is None:
        return ArrowSource(pa.concat_tables([_read_parquet(file, columns) for file in files]))
    return ipc(_decoded(files, columns, os.fspath(cache)))


def ipc(paths: Paths) -> ArrowSource:
    """Arrow IPC files (also called Feather), memory-mapped.

    Raises:
      FileNotFoundError: no file at a path or pattern.
      ValueError: a file that is truncated or not Arrow IPC.
    """
    return _IpcSource(expand(paths))


class _IpcSource(ArrowSource):
    def __init__(self, files: list[str]):
        self._files = files
        super().__init__(pa.concat_tables([_open_ipc(file) for file in files]))

    def __reduce__(self) -> Any:
        return _IpcSource, (self._files,)  # maps the files again instead of copying them


def from_datasets(dataset: Any) -> ArrowSource | None:
    """A Hugging Face `datasets.Dataset` without a copy, or None where its features must be decoded by it."""
    chosen = dataset.format["columns"] or dataset.column_names
    features = dataset.info.features  # dataset.features is a deep copy
    plain = all(_is_plain(features[name]) for name in chosen)
    if not plain or dataset.format["type"] == "custom":
        return None
    rows = getattr(dataset, "_indices", None)  # of a dataset that was shuffled, filtered or selected from
    if rows is not None:
        rows = rows.column(0).to_numpy().astype(np.int64)
    return ArrowSource(dataset.data.table.select(chosen), rows)


def _is_plain(feature: Any) -> bool:
    """Numbers, strings, bytes and labels, and lists and dicts of them: what Arrow holds is what the user sees."""
    kind = type(feature).__name__
    if isinstance(feature, dict):
        return False
    if isinstance(feature, list):
        return all(map(_is_plain, feature))
    if kind in ("Sequence", "List", "LargeList"):
        return _is_plain(feature.feature)
    return kind in ("Value", "ClassLabel") or kind.startswith("Array")


def _read_parquet(file: str, columns: Sequence[str] | None) -> pa.Table:
    with _reading(file, "Parquet"):
        with pq.ParquetFile(file, memory_map=True) as opened:
            _check_columns(file, columns, opened.schema_arrow.names)
            return opened.read(columns=columns)


def _check_columns(file: str, columns: Sequence[str] | None, names: list[str]) -> None:
    missing = [name for name in columns or () if name not in names]
    if missing:
        raise ValueError(f"{file!r} has no column {missing[0]!r}; it has {names}")


class _reading:  # noqa: N801 - a context manager, used like a function
    """Turns pyarrow's errors into one that names the file."""

    def __init__(self, file: str, kind: str):
        self._file, self._kind = file, kind

    def __enter__(self) -> None:
        if os.path.isdir(self._file):
            raise IsADirectoryError(f"{self._file!r} is a folder: give a pattern such as {self._file + '/*.parquet'!r}")

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, (pa.ArrowException, OSError)):
            raise ValueError(
                f"{self._file!r} ({os.path.getsize(self._file):,} bytes) is no complete {self._kind} file: {error}. "
                "Was it cut short while it was written or copied?"
            ) from error


def _decoded(files: list[str], columns: Sequence[str] | None, cache: str) -> str:
    """The files decoded into one Arrow IPC file under `cache`, whose name tells what it was made from."""
    import hashlib

    made_from = repr([(os.path.abspath(f), os.path.getsize(f), os.stat(f).st_mtime_ns) for f in files] + [columns])
    path = os.path.join(cache, f"penstock-{hashlib.sha256(made_from.encode()).hexdigest()[:20]}.arrow")
    if os.path.exists(path):
        return path
    os.makedirs(cache, exist_ok=True)
    partial = f"{path}.{os.getpid()}.partial"
    try:
        _write_ipc(files, columns, partial)
        os.replace(partial, path)  # atomic: another process sees the whole file or none
    finally:
        if os.path.exists(partial):
            os.remove(partial)
    return path


def _write_ipc(files: list[str], columns: Sequence[str] | None, path: str) -> None:
    writer = None
    for file in files:
        with _reading(file, "Parquet"), pq.ParquetFile(file, memory_map=True) as opened:
            _check_columns(file, columns, opened.schema_arrow.names)
            for group in range(opened.num_row_groups):
                table = opened.read_row_group(group, columns=columns).combine_chunks()
                writer = writer or pa.ipc.new_file(path, table.schema)
                writer.write_table(table)
    if writer is not None:
        writer.close()


def _open_ipc(file: str) -> pa.Table:
    with _reading(file, "Arrow IPC"):
        mapped = pa.memory_map(file)
        try:
            return pa.ipc.open_file(mapped).read_all()
        except pa.ArrowInvalid:
            mapped.seek(0)
            return pa.ipc.open_stream(mapped).read_all()  # as Hugging Face datasets writes it


def _column(name: str, column: pa.ChunkedArray) -> Any:
    chunks = [chunk for chunk in column.chunks if len(chunk)]
    plain = [_storage(chunk) for chunk in chunks]
    if not _is_numbers(plain[0].type):
        return _Objects(column)
    if nulls := column.null_count:
        raise ValueError(
            f"column {name!r} has {nulls:,} nulls, which no array can hold: fill them (pyarrow.compute.fill_null) or leave "
            "these rows out"
        )
    views = [view for chunk in plain if (view := _view(chunk)) is not None]
    if len(views) == len(plain) and len({view.shape[1:] for view in views}) == 1:
        return Rows(views)
    return _Ragged(plain)


def _storage(chunk: pa.Array) -> pa.Array:
    if isinstance(chunk, pa.ExtensionArray):
        return chunk.storage
    return chunk.dictionary_decode() if pa.types.is_dictionary(chunk.type) else chunk


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_numbers(kind: pa.DataType) -> bool:
    while _is_list(kind):
        kind = kind.value_type
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _view(chunk: pa.Array) -> np.ndarray | None:
    """Rows of a chunk as an array [rows, ...] over Arrow's own memory; None where they differ in size."""
    if not _is_list(chunk.type):
        # Arrow packs booleans into bits, so these alone are copied.
        return chunk.to_numpy(zero_copy_only=not pa.types.is_boolean(chunk.type))
    if chunk.flatten().null_count:
        raise ValueError("nulls inside of a list column, which no array can hold: fill them or leave these rows out")
    if pa.types.is_fixed_size_list(chunk.type):
        size = chunk.type.list_size
    else:
        sizes = np.diff(chunk.offsets.to_numpy())
        if (sizes != sizes[0]).any():
            return None
        size = int(sizes[0])
    inner = _view(chunk.flatten())
    return None if inner is None else inner.reshape(len(chunk), size, *inner.shape[1:])


class Rows:
    """Rows of equal size in several blocks of memory, gathered by one fancy index.

    A Hugging Face dataset has a chunk for every 1,000 rows; gathering chunk by chunk costs a Python
    call for each. Instead all rows are seen as elements of one array that starts at the lowest address and
    whose stride is the greatest common divisor of all distances between rows: row r of block b is then
    element `(address(b) - lowest + r · row bytes) / stride`. The array spans memory that is not
    ours between the blocks, but only elements that are rows of a block are ever indexed, and `self._blocks`
    keeps those alive.
    """

    def __init__(self, blocks: Sequence[np.ndarray]):
        self._blocks = blocks
        self._starts = np.cumsum([0] + [len(block) for block in blocks])
        first = blocks[0]
        if len(blocks) == 1 or first[:1].nbytes == 0:
            self._elements = first if len(blocks) == 1 else np.concatenate(blocks)
            return
        self._blocks = blocks = [np.ascontiguousarray(block) for block in blocks]
        address = np.array([block.ctypes.data for block in blocks])
        lowest = int(address.min())
        size = first[:1].nbytes
        stride = math.gcd(size, *(address - lowest).tolist())
        self._offset = (address - lowest) // stride
        self._per_row = size // stride
        last = int((self._offset + (np.diff(self._starts) - 1) * self._per_row).max())
        self._elements = np.lib.stride_tricks.as_strided(
            blocks[int(address.argmin())], (last + 1, *first.shape[1:]), (stride, *blocks[0].strides[1:]), writeable=False
        )

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Rows [n, ...] at int64 [n], copied; IndexError outside of `[0, rows)`."""
        if len(self._starts) == 2 or not hasattr(self, "_offset"):
            return np.take(self._elements, indices, axis=0)
        if indices.size and (indices.min() < 0 or indices.max() >= self._starts[-1]):
            raise IndexError(f"row {indices.max()} of {self._starts[-1]}")
        block = np.searchsorted(self._starts, indices, side="right") - 1
        return self._elements[self._offset[block] + (indices - self._starts[block]) * self._per_row]


class _Ragged:
    """Lists of numbers that differ in length: one array a record."""

    def __init__(self, chunks: Sequence[pa.Array]):
        self._starts = np.cumsum([0] + [len(chunk) for chunk in chunks])
        self._chunks = chunks
        self._flat = [
            (chunk.offsets.to_numpy(), chunk.values.to_numpy(zero_copy_only=False))
            if not _is_list(chunk.type.value_type)
            else None
            for chunk in chunks
        ]

    def take(self, indices: np.ndarray) -> list[np.ndarray]:
        block = np.searchsorted(self._starts, indices, side="right") - 1
        return [self._row(b, i) for b, i in zip(block.tolist(), (indices - self._starts[block]).tolist(), strict=True)]

    def _row(self, block: int, row: int) -> np.ndarray:
        flat = self._flat[block]
        if flat is None:
            return np.asarray(self._chunks[block][row].as_py())
        offsets, values = flat
        return values[offsets[row] : offsets[row + 1]]


class _Objects:
    """Whatever has no array form, as Python objects."""

    def __init__(self, column: pa.ChunkedArray):
        self._column = column

    def take(self, indices: np.ndarray) -> list[Any]:
        return self._column.take(pa.array(indices)).to_pylist()
