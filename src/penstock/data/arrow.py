"""Read Arrow tables: in memory, in Arrow IPC or Parquet files, or inside of a Hugging Face dataset.

A batch is a dict with one leaf for each column. A column has one of three forms:

- All rows have the same size: numbers, dates and times, tensors, fixed-size lists, lists of equal length, nested lists of these.
  The chunks are viewed as NumPy arrays [rows, ...] without a copy, and a batch is one gather.
- The rows are lists of numbers of different lengths. Each record is one array, for `ps.pad_to`.
- All other types (strings, bytes, structs, decimals) are read as Python objects, for `ps.per_record`. Only these need Python code
  for each record.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from penstock._atomic_write import replacing
from penstock.data.array_pickling import FileVersion
from penstock.data.arrays import RowBlocks
from penstock.data.records import expand
from penstock.data.remote.files import RemoteFiles, RemoteSource, as_remote
from penstock.data.tree import Batch, Record

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | RemoteFiles


class ArrowSource:
    """A source over a table. A batch has one leaf for each column, with the name of the column.

    Args:
      table: a `pyarrow.Table`, which stays on disk if it is memory-mapped, or a table that exports Arrow's C stream.
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
        self._columns = _columns_of(self._table, rows)
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


def _columns_of(table: pa.Table, rows: np.ndarray | None = None) -> dict[str, Column]:
    return {name: as_column(name, table[name], rows) for name in table.column_names if table.num_rows}


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
        tables = [_read_parquet(file, columns) for file in files]
        with _naming_file(files, tables):
            return ArrowSource(_concatenated(files, tables))
    return ipc(_decode_once(files, columns, os.path.expanduser(os.fspath(cache))))


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
      versions: of the files in the process that has pickled the source, after which they must not change; None in the first one.
    """

    def __init__(self, files: list[str], versions: list[FileVersion] | None = None):
        self._files = files
        self._versions = versions or [FileVersion.of_array(file, is_open=False) for file in files]
        tables = [_open_ipc(file) for file in files]
        with _naming_file(files, tables):
            super().__init__(_concatenated(files, tables))
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
    """Return whether Arrow holds the values that the user sees: numbers, strings, bytes and labels, and lists of them."""
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
    if missing := [name for name in columns or () if name not in names]:
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


@contextmanager
def _naming_file(files: Sequence[str], tables: Sequence[pa.Table]) -> Iterator[None]:
    """Add the file to an error about a column, such as one with nulls."""
    try:
        yield
    except ValueError:
        for file, table in zip(files, tables, strict=True):
            try:
                _columns_of(table)
            except ValueError as error:
                raise ValueError(f"{file!r}: {error}") from None
        raise


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
    made_from = repr([(os.path.abspath(f), os.path.getsize(f), os.stat(f).st_mtime_ns) for f in files] + [columns])
    path = os.path.join(cache, f"penstock-{hashlib.sha256(made_from.encode()).hexdigest()[:20]}.arrow")
    if os.path.exists(path):
        return path
    os.makedirs(cache, exist_ok=True)
    with replacing(Path(path)) as part:
        _write_ipc(files, columns, str(part))
    return path


def _write_ipc(files: list[str], columns: Sequence[str] | None, path: str) -> None:
    schema = next(_row_groups(files[0], columns)).schema
    with pa.ipc.new_file(path, schema) as writer:
        for file in files:
            for table in _row_groups(file, columns):
                _check_same_schema(files[0], schema, file, table.schema)
                with _naming_file([file], [table]):
                    _columns_of(table)  # before nulls are written, which would be an error of the decoded file
                writer.write_table(table)


def _row_groups(file: str, columns: Sequence[str] | None) -> Iterator[pa.Table]:
    """Yield a table without rows, which gives the schema of any file, and then one table for each row group."""
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


# The columns of a table.


class Column(Protocol):
    """The rows of one column."""

    def take(self, indices: np.ndarray) -> np.ndarray | list[Any]:
        """Return the rows at int64 [n] as an array [n, ...] or a list of n values. The caller may write to them."""


def as_column(name: str, column: pa.ChunkedArray, rows: np.ndarray | None = None) -> Column:
    """Choose the form of a column that is read fastest.

    Args:
      name: for errors.
      rows: int64 [n], the rows that may be taken; None for all rows. Other rows may hold nulls.

    Raises:
      ValueError: a column with an array form has nulls among `rows`.
    """
    chunks = [chunk for chunk in column.chunks if len(chunk)]
    if not _has_array_form(column.type):
        view = _VIEWS.get(str(column.type))
        return _Objects(chunks if view is None else [chunk.cast(view) for chunk in chunks])
    if pa.types.is_dictionary(column.type):
        chunks = [chunk.dictionary_decode() for chunk in chunks]
    nulls = sum(map(_nulls, chunks))
    if not nulls:
        return _array_column(name, chunks)
    if rows is not None:
        return _SelectedRows(name, chunks, np.unique(rows))
    where = "" if any(chunk.null_count for chunk in chunks) else " inside of its lists"
    raise ValueError(
        f"column {name!r} has {nulls:,} nulls{where}, which no array can hold: fill them (pyarrow.compute.fill_null), or leave "
        "these rows or the column out"
    )


def _array_column(name: str, chunks: Sequence[pa.Array]) -> Column:
    views = [view for chunk in chunks if (view := _view(chunk)) is not None]
    if len(views) == len(chunks) and len({view.shape[1:] for view in views}) == 1:
        return Rows(views)
    return Ragged(name, [_storage(chunk) for chunk in chunks])


def _storage(chunk: pa.Array) -> pa.Array:
    return chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_instant(kind: pa.DataType) -> bool:
    """Return whether a type becomes NumPy's datetime64 or timedelta64, which represent a null as NaT."""
    return pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_duration(kind)


def _has_array_form(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    while _is_list(kind) or isinstance(kind, pa.BaseExtensionType):
        kind = kind.value_type if _is_list(kind) else kind.storage_type
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind) or _is_instant(kind)


def _nulls(chunk: pa.Array) -> int:
    """Count the nulls in the outermost dimension that has any."""
    chunk = _storage(chunk)
    if _is_list(chunk.type) and not chunk.null_count:
        return _nulls(chunk.flatten())
    return 0 if _is_instant(chunk.type) else chunk.null_count


def _view(chunk: pa.Array) -> np.ndarray | None:
    """View the rows of a chunk without nulls as an array [rows, ...] over Arrow's memory; None if their sizes differ."""
    if isinstance(chunk.type, pa.FixedShapeTensorType):
        return _tensors(chunk)
    chunk = _storage(chunk)
    if not _is_list(chunk.type):
        return chunk.to_numpy(zero_copy_only=False)  # copies only booleans, which Arrow stores as bits, and dates
    if pa.types.is_fixed_size_list(chunk.type):
        size = chunk.type.list_size
    else:
        sizes = np.diff(chunk.offsets.to_numpy())
        size = int(sizes[0]) if len(sizes) else 0
        if (sizes != size).any():
            return None
    inner = _view(chunk.flatten())
    return None if inner is None else inner.reshape(len(chunk), size, *inner.shape[1:])


def _tensors(chunk: pa.Array) -> np.ndarray | None:
    rows = _view(chunk.storage)
    if rows is None:
        return None
    rows = rows.reshape(len(chunk), *chunk.type.shape)
    order = chunk.type.permutation
    # A permuted tensor is copied once here, because otherwise each gather would copy it.
    return np.ascontiguousarray(rows.transpose(0, *(1 + axis for axis in order))) if order else rows


def _starts(chunks: Sequence[Any]) -> np.ndarray:
    """Return the first row of each chunk, and at the end the number of rows."""
    return np.cumsum([0] + [len(chunk) for chunk in chunks])


def _locate(starts: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each row the chunk that holds it, and its row within that chunk."""
    chunk = np.searchsorted(starts, indices, side="right") - 1
    return chunk, indices - starts[chunk]


class Rows(RowBlocks):
    """The rows of a column that have equal size. A Hugging Face dataset has a block for every 1,000 of them."""

    def __init__(self, blocks: Sequence[np.ndarray]):
        super().__init__([np.ascontiguousarray(block) for block in blocks])

    def as_lists(self) -> list[tuple[np.ndarray, np.ndarray]] | None:
        """Return for each block of rows [rows, n] the offsets of its rows, and all its elements; None for other rows."""
        if self.blocks[0].ndim != 2:
            return None
        return [(np.arange(len(block) + 1) * block.shape[1], block.reshape(-1)) for block in self.blocks]


class Ragged:
    """Lists of numbers of different lengths. Each record is one array."""

    def __init__(self, name: str, chunks: Sequence[pa.Array]):
        self._name = name
        self._starts = _starts(chunks)
        self._chunks = chunks
        self._flat = _flattened(chunks)

    def as_lists(self) -> list[tuple[np.ndarray, np.ndarray]] | None:
        """Return for each chunk the offsets of its rows, and the array [total] of their elements; None if they are no numbers."""
        return self._flat if self._flat is not None and all(values.ndim == 1 for _, values in self._flat) else None

    def take(self, indices: np.ndarray) -> list[np.ndarray]:
        block, row = _locate(self._starts, indices)
        return [self._row(b, i) for b, i in zip(block.tolist(), row.tolist(), strict=True)]

    def _row(self, block: int, row: int) -> np.ndarray:
        if self._flat is not None:
            offsets, values = self._flat[block]
            return values[offsets[row] : offsets[row + 1]].copy()
        rows = _view(self._chunks[block].slice(row, 1))
        if rows is None:
            raise ValueError(
                f"column {self._name!r} has a row whose own lists differ in length, which no array can hold: flatten or pad "
                "them before, or leave the column out"
            )
        return rows[0].copy()


def _flattened(chunks: Sequence[pa.Array]) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """Return for each chunk the offsets of its rows, and the array [total, ...] of all their elements.

    Returns:
      None if the elements differ in size, such as the rows of images [height, width] of different widths.
    """
    if pa.types.is_fixed_size_list(chunks[0].type):
        return None
    values = [view for chunk in chunks if (view := _view(chunk.flatten())) is not None]
    shapes = {view.shape[1:] for view in values if len(view)}
    if len(values) < len(chunks) or len(shapes) > 1:
        return None
    shape = shapes.pop() if shapes else values[0].shape[1:]  # a chunk that has only empty lists does not define it
    offsets = [chunk.offsets.to_numpy() for chunk in chunks]
    offsets = [at - at[0] if at[0] else at for at in offsets]  # the offsets of a slice do not begin at 0
    return [(at, view.reshape(len(view), *shape)) for at, view in zip(offsets, values, strict=True)]


# Arrow has no `take` for texts as views, which polars exports. Inside of lists and structs, it refuses their parent too.
_VIEWS = {"string_view": pa.large_string(), "binary_view": pa.large_binary()}


class _Objects:
    """Rows without an array form, read as Python objects."""

    def __init__(self, chunks: Sequence[pa.Array]):
        self._starts = _starts(chunks)
        self._chunks = chunks
        self._takes = len(chunks) == 1 and _can_take(chunks[0])

    def take(self, indices: np.ndarray) -> list[Any]:
        if self._takes:
            return self._chunks[0].take(pa.array(indices)).to_pylist()
        # ChunkedArray.take would join all chunks for each batch, and it fails above 2 GB of text.
        block, row = _locate(self._starts, indices)
        return [self._chunks[b][i].as_py() for b, i in zip(block.tolist(), row.tolist(), strict=True)]


def _can_take(chunk: pa.Array) -> bool:
    """Return whether Arrow can take rows of an array; not if it has views inside of lists or structs (`_VIEWS`)."""
    try:
        chunk.take(pa.array([0]))
    except pa.ArrowNotImplementedError:
        return False
    return True


class _SelectedRows:
    """A copy of the selected rows, int64 [n], increasing, of a column that has nulls in other rows."""

    def __init__(self, name: str, chunks: Sequence[pa.Array], rows: np.ndarray):
        self._rows = rows
        starts = _starts(chunks)
        ends = np.searchsorted(rows, starts)
        parts = [
            chunk.take(pa.array(rows[begin:end] - start))
            for chunk, start, begin, end in zip(chunks, starts, ends, ends[1:], strict=False)
        ]
        self._column = as_column(name, pa.chunked_array(parts))

    def take(self, indices: np.ndarray) -> np.ndarray | list[Any]:
        return self._column.take(np.searchsorted(self._rows, indices))
