"""Columns of an Arrow table, read without per-record Python where their rows have an array form.

A column whose rows all have one size (numbers, dates and times, tensors, fixed-size lists, lists that happen to be
of equal length, nested lists of these) is used in place: its chunks are viewed as NumPy arrays [rows, ...], wherever
they lie, and a batch is one gather. A ragged list column gives one array a record, for `ps.pad_to`. Everything else
(strings, bytes, structs, decimals) comes as Python objects, for `ps.per_record`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa


class Column(Protocol):
    def take(self, indices: np.ndarray) -> np.ndarray | list[Any]:
        """Rows at int64 [n], which are the caller's to write to: an array [n, ...], or a list of n."""


def as_column(name: str, column: pa.ChunkedArray, rows: np.ndarray | None = None) -> Column:
    """The column in the form that is read fastest.

    Args:
      rows: int64 [n]; which rows will be taken, all if None. What the others hold does not matter.

    Raises:
      ValueError: nulls among the rows of a column that has an array form.
    """
    chunks = [chunk for chunk in column.chunks if len(chunk)]
    if not _has_array_form(column.type):
        return _Objects(chunks)
    if pa.types.is_dictionary(column.type):
        chunks = [chunk.dictionary_decode() for chunk in chunks]
    nulls = sum(map(_nulls, chunks))
    if not nulls:
        return _of_arrays(name, chunks)
    if rows is not None:
        return _Chosen(name, chunks, np.unique(rows))
    where = "" if any(chunk.null_count for chunk in chunks) else " inside of its lists"
    raise ValueError(
        f"column {name!r} has {nulls:,} nulls{where}, which no array can hold: fill them (pyarrow.compute.fill_null) or leave "
        "these rows out"
    )


def _of_arrays(name: str, chunks: Sequence[pa.Array]) -> Column:
    views = [view for chunk in chunks if (view := _view(chunk)) is not None]
    if len(views) == len(chunks) and len({view.shape[1:] for view in views}) == 1:
        return Rows(views)
    return _Ragged(name, [_storage(chunk) for chunk in chunks])


def _storage(chunk: pa.Array) -> pa.Array:
    return chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_instant(kind: pa.DataType) -> bool:
    """Dates, times of a date, and durations: NumPy's datetime64 and timedelta64, which have a null of their own, NaT."""
    return pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_duration(kind)


def _has_array_form(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    while _is_list(kind) or isinstance(kind, pa.BaseExtensionType):
        kind = kind.value_type if _is_list(kind) else kind.storage_type
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind) or _is_instant(kind)


def _nulls(chunk: pa.Array) -> int:
    """How many nulls there are in the outermost dimension that has any."""
    chunk = _storage(chunk)
    if _is_list(chunk.type) and not chunk.null_count:
        return _nulls(chunk.flatten())
    return 0 if _is_instant(chunk.type) else chunk.null_count


def _view(chunk: pa.Array) -> np.ndarray | None:
    """Rows of a chunk without nulls as an array [rows, ...] over Arrow's own memory; None where they differ in size."""
    if isinstance(chunk.type, pa.FixedShapeTensorType):
        return _tensors(chunk)
    chunk = _storage(chunk)
    if not _is_list(chunk.type):
        return chunk.to_numpy(zero_copy_only=False)  # a copy of booleans, which Arrow packs into bits, and of dates alone
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
    # Out of order it is copied once, here, for else each gather would.
    return np.ascontiguousarray(rows.transpose(0, *(1 + axis for axis in order))) if order else rows


def _starts(chunks: Sequence[Any]) -> np.ndarray:
    """The first row of each chunk, and the number of rows."""
    return np.cumsum([0] + [len(chunk) for chunk in chunks])


def _locate(starts: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The chunk that each row is in, and which row of that chunk it is."""
    chunk = np.searchsorted(starts, indices, side="right") - 1
    return chunk, indices - starts[chunk]


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
        self._starts = _starts(blocks)
        self._offset: np.ndarray | None = None  # of each block, unless one array holds all rows one after the other
        self._elements: Any = None  # where no array spans the blocks
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
        if (last + 1) * size > np.iinfo(np.intp).max:
            return  # NumPy counts the bytes of all elements, however they overlap, and has no larger array
        self._elements = np.lib.stride_tricks.as_strided(
            blocks[int(address.argmin())], (last + 1, *first.shape[1:]), (stride, *blocks[0].strides[1:]), writeable=False
        )

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Rows [n, ...] at int64 [n], copied; IndexError outside of `[0, rows)`."""
        if self._offset is None:
            return np.take(self._elements, indices, axis=0)
        if indices.size and (indices.min() < 0 or indices.max() >= self._starts[-1]):
            raise IndexError(f"rows {indices.min()} to {indices.max()} of {self._starts[-1]}")
        block, row = _locate(self._starts, indices)
        if self._elements is None:
            return self._block_by_block(block, row)
        return self._elements[self._offset[block] + row * self._per_row]

    def _block_by_block(self, block: np.ndarray, row: np.ndarray) -> np.ndarray:
        out = np.empty((len(row), *self._blocks[0].shape[1:]), self._blocks[0].dtype)
        for b in np.unique(block):
            here = block == b
            out[here] = self._blocks[b][row[here]]
        return out


class _Ragged:
    """Lists of numbers that differ in length: one array a record."""

    def __init__(self, name: str, chunks: Sequence[pa.Array]):
        self._name = name
        self._starts = _starts(chunks)
        self._chunks = chunks
        self._flat = _flattened(chunks)

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
    """For each chunk where its rows begin and end in the array [total, ...] of all their elements.

    None where elements differ in size, such as those of images [height, width] of several widths.
    """
    if pa.types.is_fixed_size_list(chunks[0].type):
        return None
    values = [view for chunk in chunks if (view := _view(chunk.flatten())) is not None]
    shapes = {view.shape[1:] for view in values if len(view)}
    if len(values) < len(chunks) or len(shapes) > 1:
        return None
    shape = shapes.pop() if shapes else values[0].shape[1:]  # a chunk of empty lists alone does not tell
    offsets = [chunk.offsets.to_numpy() for chunk in chunks]
    offsets = [at - at[0] if at[0] else at for at in offsets]  # of a slice they begin elsewhere
    return [(at, view.reshape(len(view), *shape)) for at, view in zip(offsets, values, strict=True)]


class _Objects:
    """Whatever has no array form, as Python objects."""

    def __init__(self, chunks: Sequence[pa.Array]):
        self._starts = _starts(chunks)
        self._chunks = chunks

    def take(self, indices: np.ndarray) -> list[Any]:
        if len(self._chunks) == 1:
            return self._chunks[0].take(pa.array(indices)).to_pylist()
        # Not ChunkedArray.take: it joins all chunks first, for each batch, and fails above 2 GB of text.
        block, row = _locate(self._starts, indices)
        return [self._chunks[b][i].as_py() for b, i in zip(block.tolist(), row.tolist(), strict=True)]


class _Chosen:
    """A column that has nulls in rows that are never taken: a copy of the others.

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
        return self._column.take(np.searchsorted(self._rows, indices))
