"""A source over Arrow tables: in memory, in Arrow IPC or Parquet files, or inside of a Hugging Face dataset.

A table and record indices int64 [n] go in; a dict batch with one leaf for each column comes out. No Python code runs for each
record, unless a column has no array form (see `columns`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from penstock._atomic_write import replacing
from penstock.data.array_pickling import FileVersion
from penstock.data.columns import Ragged, Rows, as_column
from penstock.data.records import expand
from penstock.data.remote.files import RemoteFiles
from penstock.data.remote.source import RemoteSource, as_remote
from penstock.data.row_blocks import RowBlocks
from penstock.data.tree import Batch, Record

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | RemoteFiles


class ArrowSource:
    """A source over a `pyarrow.Table`. A batch has one leaf for each column, with the name of the column.

    Args:
      table: the records. A memory-mapped table stays on disk.
      rows: int64 [N], the rows of the table that are the records; None for all rows.

    Attributes:
      is_gather: whether `read` only copies rows from memory or from memory-mapped files.

    Raises:
      TypeError: `table` is a single array, which has no column name.
      ValueError: there are no rows; two columns have the same name; a column of numbers or lists has nulls.
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
        self.is_gather = all(isinstance(column, Rows) for column in self._columns.values())

    def __len__(self) -> int:
        """Return the number of records."""
        return self._table.num_rows if self._rows is None else len(self._rows)

    def read(self, indices: np.ndarray) -> Batch | list[Record]:
        """Return the records at int64 [n]: a dict of arrays [n, ...], or a list of n dicts if a column has no array form."""
        rows = self.table_rows(indices)
        columns = {name: column.take(rows) for name, column in self._columns.items()}
        if all(isinstance(column, np.ndarray) for column in columns.values()):
            return columns
        return [dict(zip(columns, record, strict=True)) for record in zip(*columns.values(), strict=True)]

    def row_blocks(self) -> Mapping[str, RowBlocks] | None:
        """Return the rows of each column; None if they are not rows of equal size in memory, all of them records."""
        columns = {name: column for name, column in self._columns.items() if isinstance(column, Rows)}
        return columns if self._rows is None and len(columns) == len(self._columns) else None

    def table_rows(self, indices: np.ndarray) -> np.ndarray:
        """Return the rows of the table that are the records at int64 [n]."""
        return indices if self._rows is None else self._rows.take(indices)

    def ragged_columns(self) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
        """Return for each column of lists of numbers, and each chunk of it, the offsets of its rows and all its numbers."""
        columns = {name: column for name, column in self._columns.items() if isinstance(column, (Rows, Ragged))}
        return {name: lists for name, column in columns.items() if (lists := column.as_lists()) is not None}

    def select(self, name: str) -> ArrowSource:
        """Return a source of one column."""
        return ArrowSource(self._table.select([name]), self._rows)

    def describe(self) -> str:
        """Return the names and Arrow types of the columns."""
        return ", ".join(f"{field.name}: {field.type}" for field in self._table.schema)

    def __reduce__(self) -> Any:
        return ArrowSource, (self._table, self._rows)


def _check_names(names: list[str]) -> None:
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"{len(repeated)} columns share a name, {sorted(set(repeated))}, and a batch holds one leaf a name: rename them "
            "(table.rename_columns) or leave some out (table.select, by position)"
        )


def parquet(
    paths: Paths, columns: Sequence[str] | None = None, cache: str | os.PathLike[str] | None = None
) -> ArrowSource | RemoteSource:
    """Open Parquet files as a source.

    Parquet is compressed, so single records cannot be read from disk. The chosen columns are decoded once, here.

    Args:
      paths: files, URLs or glob patterns, or the result of `ps.remote`; the records are in this order.
      columns: names of the columns to read; None for all columns.
      cache: None decodes into memory. A folder decodes into a memory-mapped Arrow IPC file in that folder, one row group at a
        time, for data larger than memory. A later run with the same files and columns reuses it.

    Returns:
      A source, for `ps.Loader`.

    Raises:
      FileNotFoundError: there is no file at a path or pattern.
      ValueError: a file is truncated or not Parquet; a column does not exist; the files have different columns.

    Examples:
      >>> import pyarrow as pa, pyarrow.parquet, tempfile
      >>> path = tempfile.mkdtemp() + "/numbers.parquet"
      >>> pyarrow.parquet.write_table(pa.table({"x": [1, 2, 3], "y": [4, 5, 6]}), path)
      >>> parquet(path, columns=["x"]).read(np.array([2, 0]))
      {'x': array([3, 1])}
    """
    if (remote := as_remote(paths)) is not None:
        return RemoteSource(remote, partial(parquet, columns=columns, cache=cache))
    files = expand(paths)
    if cache is None:
        return ArrowSource(_concatenated(files, [_read_parquet(file, columns) for file in files]))
    return ipc(_decode_once(files, columns, os.fspath(cache)))


def ipc(paths: Paths) -> ArrowSource | RemoteSource:
    """Map Arrow IPC files (also called Feather) into memory as a source.

    Args:
      paths: files, URLs or glob patterns, or the result of `ps.remote`; the records are in this order.

    Returns:
      A source. When it is pickled, the receiving process maps the files again.

    Raises:
      FileNotFoundError: there is no file at a path or pattern.
      ValueError: a file is truncated or not Arrow IPC; the files have different columns.
    """
    if (remote := as_remote(paths)) is not None:
        return RemoteSource(remote, ipc)
    return _IpcSource(expand(paths))


class _IpcSource(ArrowSource):
    """An `ArrowSource` over memory-mapped files, which is pickled as their paths and versions.

    Args:
      files: the paths.
      versions: those of the files in the process that has pickled the source; None in the first one.

    Raises:
      OSError: a file has changed since the source was made.
    """

    def __init__(self, files: list[str], versions: list[FileVersion] | None = None):
        self._files = files
        self._versions = versions or [FileVersion.of_array(file, is_open=False) for file in files]
        super().__init__(_concatenated(files, [_open_ipc(file) for file in files]))
        for version in self._versions:
            version.check()

    def __reduce__(self) -> Any:
        return _IpcSource, (self._files, self._versions)


def from_datasets(dataset: Any) -> ArrowSource | None:
    """Return a source over the Arrow table of a Hugging Face `datasets.Dataset`, without a copy.

    Returns:
      None if the dataset itself must decode its features, such as images, or has a custom format.
    """
    chosen = dataset.format["columns"] or dataset.column_names
    features = dataset.info.features  # dataset.features is a deep copy
    plain = all(_is_plain(features[name]) for name in chosen)
    if not plain or dataset.format["type"] == "custom":
        return None
    rows = getattr(dataset, "_indices", None)  # set by shuffle, filter and select
    if rows is not None:
        rows = rows.column(0).to_numpy().astype(np.int64)
    table = dataset.data.table.select(chosen)
    return _MappedDatasetSource(dataset, table, rows) if dataset.cache_files else ArrowSource(table, rows)


class _MappedDatasetSource(ArrowSource):
    """An `ArrowSource` over a dataset in memory-mapped files. The dataset is pickled, which sends their paths."""

    def __init__(self, dataset: Any, table: pa.Table, rows: np.ndarray | None):
        self._dataset = dataset
        super().__init__(table, rows)

    def select(self, name: str) -> ArrowSource:
        """Return a source of one column."""
        selected = from_datasets(self._dataset.select_columns([name]))
        assert selected is not None  # the column was read here already
        return selected

    def __reduce__(self) -> Any:
        return from_datasets, (self._dataset,)


def _is_plain(feature: Any) -> bool:
    """Return whether the Arrow values of a feature are the values that the user sees.

    This holds for numbers, strings, bytes and labels, and for lists of them.
    """
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
        _check_same_schema(files[0], tables[0].schema, file, table.schema)
    return pa.concat_tables(tables)


def _check_same_schema(first: str, first_schema: pa.Schema, other: str, other_schema: pa.Schema) -> None:
    if other_schema.equals(first_schema):
        return
    one, two = ([f"{x.name}: {x.type}{'' if x.nullable else ' not null'}" for x in s] for s in (first_schema, other_schema))
    if set(one) != set(two):  # otherwise only their order differs
        one, two = [x for x in one if x not in two], [x for x in two if x not in one]
    raise ValueError(
        f"{first!r} and {other!r} differ in their columns: [{', '.join(one)}] and [{', '.join(two)}]. Files that are read "
        "together need columns of the same names, types and order: write them again alike, or read common columns alone"
    )


class _reading:  # noqa: N801 - a context manager, used like a function
    """A context manager that replaces an error of pyarrow about damaged data by a ValueError that names the file."""

    def __init__(self, file: str, kind: str):
        self._file, self._kind = file, kind

    def __enter__(self) -> None:
        if os.path.isdir(self._file):
            raise IsADirectoryError(f"{self._file!r} is a folder: give a pattern such as {self._file + '/*.parquet'!r}")

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        # An error with an error number comes from the operating system, such as a missing permission. Damaged data has none.
        if isinstance(error, pa.ArrowInvalid) or (isinstance(error, OSError) and error.errno is None):
            raise ValueError(
                f"{self._file!r} ({os.path.getsize(self._file):,} bytes) is not a complete {self._kind} file: {error}. "
                "Was it cut short while it was written or copied?"
            ) from error


def _decode_once(files: list[str], columns: Sequence[str] | None, cache: str) -> str:
    """Return the path of one Arrow IPC file with the decoded files, and write it if it does not exist.

    Its name is a hash of the paths, sizes, modification times and columns.
    """
    import hashlib

    made_from = repr([(os.path.abspath(f), os.path.getsize(f), os.stat(f).st_mtime_ns) for f in files] + [columns])
    path = os.path.join(cache, f"penstock-{hashlib.sha256(made_from.encode()).hexdigest()[:20]}.arrow")
    if os.path.exists(path):
        return path
    os.makedirs(cache, exist_ok=True)
    with replacing(Path(path)) as partial:
        _write_ipc(files, columns, str(partial))
    return path


def _write_ipc(files: list[str], columns: Sequence[str] | None, path: str) -> None:
    schema = next(_row_groups(files[0], columns)).schema
    with pa.ipc.new_file(path, schema) as writer:
        for file in files:
            for table in _row_groups(file, columns):
                _check_same_schema(files[0], schema, file, table.schema)
                writer.write_table(table)


def _row_groups(file: str, columns: Sequence[str] | None) -> Iterator[pa.Table]:
    """Yield a table without rows, and then one table for each row group.

    The first gives the schema also for a file without row groups.
    """
    with _reading(file, "Parquet"), pq.ParquetFile(file, memory_map=True) as opened:
        _check_columns(file, columns, opened.schema_arrow.names)
        yield _without_dictionaries(opened.read_row_groups([], columns=columns))
        for group in range(opened.num_row_groups):
            yield _without_dictionaries(opened.read_row_group(group, columns=columns)).combine_chunks()


def _without_dictionaries(table: pa.Table) -> pa.Table:
    """Replace dictionary-encoded columns by plain ones.

    Each Parquet row group has its own dictionary, but an Arrow IPC file can have only one for each column.
    """
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
            return _read_stream(mapped)  # Hugging Face datasets writes the streaming format


_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format


def _read_stream(mapped: pa.MemoryMappedFile) -> pa.Table:
    table = pa.ipc.open_stream(mapped).read_all()
    # Arrow accepts the end of the file as the end of the stream. A file truncated between two batches would go unnoticed.
    mapped.seek(mapped.tell() - len(_END_OF_STREAM))
    if mapped.read(len(_END_OF_STREAM)) != _END_OF_STREAM:
        raise pa.ArrowInvalid(f"after {table.num_rows:,} rows it ends without Arrow's end-of-stream marker")
    return table
