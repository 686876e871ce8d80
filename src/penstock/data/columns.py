"""Columns of an Arrow table, read without Python code for each record if their rows have an array form.

A column (chunks of Arrow memory) and row numbers go in; an array [n, ...] or a list of n values comes out. There are three cases:

- All rows have the same size: numbers, dates and times, tensors, fixed-size lists, lists of equal length, nested lists of these.
  The chunks are viewed as NumPy arrays [rows, ...] without a copy, and a batch is one gather.
- The rows are lists of numbers of different lengths. Each record is one array, for `ps.pad_to`.
- All other types (strings, bytes, structs, decimals) are read as Python objects, for `ps.per_record`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from penstock.data.row_blocks import RowBlocks


class Column(Protocol):
    """The rows of one column."""

    def take(self, indices: np.ndarray) -> np.ndarray | list[Any]:
        """Return the rows at int64 [n] as an array [n, ...] or a list of n values. The caller may write to them."""


def as_column(name: str, column: pa.ChunkedArray, rows: np.ndarray | None = None) -> Column:
    """Choose the form of a column that is read fastest.

    Args:
      name: name of the column, for errors.
      column: the chunks.
      rows: int64 [n], the rows that may be taken; None for all rows. Other rows may hold nulls.

    Raises:
      ValueError: a column with an array form has nulls among `rows`.
    """
    chunks = [chunk for chunk in column.chunks if len(chunk)]
    if not _has_array_form(column.type):
        return _Objects(chunks)
    if pa.types.is_dictionary(column.type):
        chunks = [chunk.dictionary_decode() for chunk in chunks]
    nulls = sum(map(_nulls, chunks))
    if not nulls:
        return _array_column(name, chunks)
    if rows is not None:
        return _SelectedRows(name, chunks, np.unique(rows))
    where = "" if any(chunk.null_count for chunk in chunks) else " inside of its lists"
    raise ValueError(
        f"column {name!r} has {nulls:,} nulls{where}, which no array can hold: fill them (pyarrow.compute.fill_null) or leave "
        "these rows out"
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
    """Return whether a type is a date, timestamp or duration.

    They become NumPy's datetime64 and timedelta64, which represent a null as NaT.
    """
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
        """Return for each block of rows [rows, n] the offsets of its rows, and the array of all its elements.

        Returns:
          None if a row is a number, or has more dimensions.
        """
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
        """Return for each chunk the offsets of its rows, and the array [total] of their elements.

        Returns:
          None if the elements are no numbers.
        """
        return self._flat if self._flat is not None and all(values.ndim == 1 for _, values in self._flat) else None

    def take(self, indices: np.ndarray) -> list[np.ndarray]:
        """Return one array for each row."""
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


class _Objects:
    """Rows without an array form, read as Python objects."""

    def __init__(self, chunks: Sequence[pa.Array]):
        self._starts = _starts(chunks)
        self._chunks = chunks

    def take(self, indices: np.ndarray) -> list[Any]:
        """Return one Python object for each row."""
        if len(self._chunks) == 1:
            return self._chunks[0].take(pa.array(indices)).to_pylist()
        # ChunkedArray.take would join all chunks for each batch, and it fails above 2 GB of text.
        block, row = _locate(self._starts, indices)
        return [self._chunks[b][i].as_py() for b, i in zip(block.tolist(), row.tolist(), strict=True)]


class _SelectedRows:
    """A copy of the selected rows of a column that has nulls in other rows.

    Args:
      rows: int64 [n], increasing.
    """

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
        """Return the rows at these row numbers of the full column."""
        return self._column.take(np.searchsorted(self._rows, indices))
