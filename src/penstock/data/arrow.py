"""Arrow tables, Arrow IPC and Parquet files, and Hugging Face datasets, read without per-record Python."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from penstock.data.columns import Rows, as_column
from penstock.data.records import expand
from penstock.data.tree import Batch, Record

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class ArrowSource:
    """A `pyarrow.Table`: one batch leaf a column, named after it.

    Args:
      table: the records. A memory-mapped one stays on disk.
      rows: int64 [N]; which rows of the table are the records, all if None.

    Attributes:
      gathers: whether a read only copies rows from memory, or memory-mapped files.

    Raises:
      TypeError: an array without a name.
      ValueError: no rows, two columns of one name, or nulls among the rows of a column of numbers or lists.
    """

    def __init__(self, table: pa.Table, rows: np.ndarray | None = None):
        if isinstance(table, (pa.Array, pa.ChunkedArray)):
            raise TypeError(f"got a pyarrow {type(table).__name__}, a column without a name: give pa.table({{'x': array}})")
        self._table = table if isinstance(table, pa.Table) else pa.table(table)
        self._rows = rows
        if len(self) == 0:
            raise ValueError(f"no records: a table of 0 rows with columns {self._table.column_names}")
        _check_names(self._table.column_names)
        self._columns = {name: as_column(name, self._table[name], rows) for name in self._table.column_names}
        self.gathers = all(isinstance(column, Rows) for column in self._columns.values())

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


def _check_names(names: list[str]) -> None:
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"{len(repeated)} columns share a name, {sorted(set(repeated))}, and a batch holds one leaf a name: rename them "
            "(table.rename_columns) or leave some out (table.select, by position)"
        )


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
      ValueError: a file that is truncated or not Parquet; an unknown column; files whose columns differ.
    """
    files = expand(paths)
    if cache is None:
        return ArrowSource(_concatenated(files, [_read_parquet(file, columns) for file in files]))
    return ipc(_decoded(files, columns, os.fspath(cache)))


def ipc(paths: Paths) -> ArrowSource:
    """Arrow IPC files (also called Feather), memory-mapped.

    Raises:
      FileNotFoundError: no file at a path or pattern.
      ValueError: a file that is truncated or not Arrow IPC; files whose columns differ.
    """
    return _IpcSource(expand(paths))


class _IpcSource(ArrowSource):
    def __init__(self, files: list[str]):
        self._files = files
        super().__init__(_concatenated(files, [_open_ipc(file) for file in files]))

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


def _concatenated(files: Sequence[str], tables: Sequence[pa.Table]) -> pa.Table:
    for file, table in zip(files, tables, strict=True):
        _check_alike(files[0], tables[0].schema, file, table.schema)
    return pa.concat_tables(tables)


def _check_alike(first: str, first_schema: pa.Schema, other: str, other_schema: pa.Schema) -> None:
    if other_schema.equals(first_schema):
        return
    one, two = ([f"{x.name}: {x.type}{'' if x.nullable else ' not null'}" for x in s] for s in (first_schema, other_schema))
    if set(one) != set(two):  # else they differ in their order
        one, two = [x for x in one if x not in two], [x for x in two if x not in one]
    raise ValueError(
        f"{first!r} and {other!r} differ in their columns: [{', '.join(one)}] and [{', '.join(two)}]. Files that are read "
        "together need columns of the same names, types and order: write them again alike, or read common columns alone"
    )


class _reading:  # noqa: N801 - a context manager, used like a function
    """Turns pyarrow's errors into one that names the file."""

    def __init__(self, file: str, kind: str):
        self._file, self._kind = file, kind

    def __enter__(self) -> None:
        if os.path.isdir(self._file):
            raise IsADirectoryError(f"{self._file!r} is a folder: give a pattern such as {self._file + '/*.parquet'!r}")

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        # An error number is the system's: no permission, say, or too many open files. Damage has none.
        if isinstance(error, pa.ArrowInvalid) or (isinstance(error, OSError) and error.errno is None):
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
    schema = next(_row_groups(files[0], columns)).schema
    with pa.ipc.new_file(path, schema) as writer:
        for file in files:
            for table in _row_groups(file, columns):
                _check_alike(files[0], schema, file, table.schema)
                writer.write_table(table)


def _row_groups(file: str, columns: Sequence[str] | None) -> Iterator[pa.Table]:
    """A table of no rows, for a file may have no row group to tell its schema, and one for each row group."""
    with _reading(file, "Parquet"), pq.ParquetFile(file, memory_map=True) as opened:
        _check_columns(file, columns, opened.schema_arrow.names)
        yield _without_dictionaries(opened.read_row_groups([], columns=columns))
        for group in range(opened.num_row_groups):
            yield _without_dictionaries(opened.read_row_group(group, columns=columns)).combine_chunks()


def _without_dictionaries(table: pa.Table) -> pa.Table:
    """Each row group has its own dictionary, and an Arrow file holds one a column."""
    for i, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(i, field.with_type(field.type.value_type), table.column(i).cast(field.type.value_type))
    return table


def _open_ipc(file: str) -> pa.Table:
    with _reading(file, "Arrow IPC"):
        mapped = pa.memory_map(file)
        try:
            return pa.ipc.open_file(mapped).read_all()
        except pa.ArrowInvalid:
            mapped.seek(0)
            return _read_stream(mapped)  # as Hugging Face datasets writes it


_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format


def _read_stream(mapped: pa.MemoryMappedFile) -> pa.Table:
    table = pa.ipc.open_stream(mapped).read_all()
    # To Arrow the end of the file is one of the stream too, so what was cut off between two batches would not be missed.
    mapped.seek(mapped.tell() - len(_END_OF_STREAM))
    if mapped.read(len(_END_OF_STREAM)) != _END_OF_STREAM:
        raise pa.ArrowInvalid(f"after {table.num_rows:,} rows it ends without Arrow's end-of-stream marker")
    return table
