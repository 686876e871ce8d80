"""Read windows of consecutive rows of long arrays as records: `windows`.

Overlapping windows share the memory of the array: a window is a view, and a batch is one gather of views.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from penstock._arguments import at_least
from penstock.data.arrays import ArraySource, is_stored, read_ranges, read_rows, refuse_objects, row_blocks
from penstock.data.source import as_source
from penstock.data.tree import Batch


def windows(array: Any, length: int, *, stride: int | None = None) -> WindowSource:
    """Make records of a long array: record i is the rows `i·stride … i·stride + length - 1`.

    Rows after the last complete window are left out. Windows keep the order of the array, unless the Loader shuffles.

    Args:
      array: an array or memmap [T, ...] of NumPy, h5py, zarr, torch or JAX; or a pytree of such arrays with the same T.
      length: rows in a window.
      stride: rows from the start of a window to the start of the next; None for `length`. With less, windows overlap. For
        inputs and targets of a language model, use windows of L + 1 tokens with a stride of L.

    Returns:
      A `Source` of `(T - length) // stride + 1` records, each a pytree of arrays [length, ...]. Worker processes open a memmap or
      h5py file by its path, and share one copy of an array in memory.

    Raises:
      ValueError: `length` or `stride` is less than 1; the arrays have fewer rows than `length`, different lengths, or no leading
        dimension.
      TypeError: `array` holds something else than arrays.

    Examples:
      >>> tokens = np.arange(10)
      >>> ps.Loader(ps.windows(tokens, 4, stride=3), batch_size=3)[0]
      array([[0, 1, 2, 3],
             [3, 4, 5, 6],
             [6, 7, 8, 9]])
    """
    length = at_least(1, "ps.windows: length", length)
    stride = length if stride is None else at_least(1, "ps.windows: stride", stride)
    rows = as_source(array)
    refuse_objects(rows)
    if not isinstance(rows, ArraySource):
        raise TypeError(
            f"ps.windows reads long arrays, and got {type(array).__name__}: give an array (np.asarray(...)), np.memmap(path, "
            "dtype), np.load(path, mmap_mode='r'), an h5py or zarr array, or a dict of these. Documents of different lengths "
            "are for ps.pack"
        )
    if length > len(rows):
        raise ValueError(f"ps.windows: length={length:,} is more than the {len(rows):,} rows of {rows.describe()}")
    return WindowSource(rows, length, stride)


class WindowSource:
    """A source of windows of the rows of arrays; see `windows`."""

    def __init__(self, rows: ArraySource, length: int, stride: int):
        self._rows, self._length, self._stride = rows, length, stride
        self._views = jax.tree.map(self._view, rows.arrays)
        self.is_gather = rows.is_gather

    def __len__(self) -> int:
        return (len(self._rows) - self._length) // self._stride + 1

    def read(self, indices: np.ndarray) -> Batch:
        """Return new arrays [n, length, ...] with the windows at int64 [n]."""
        return jax.tree.map(lambda x: self._read_stored(x, indices) if is_stored(x) else read_rows(x, indices), self._views)

    def row_blocks(self) -> Any:
        """Return a pytree of the windows of each array; None if they do not lie in memory, each in one piece."""
        return row_blocks(self._views)

    def describe(self) -> str:
        """Return the length, the stride, and names, dtypes and shapes of the arrays."""
        return f"windows of {self._length} rows, stride {self._stride}, of {self._rows.describe()}"

    def __reduce__(self) -> Any:
        return WindowSource, (self._rows, self._length, self._stride)

    def _view(self, x: Any) -> Any:
        """View an array [T, ...] as [N, length, ...]. An array in a file stays as it is."""
        return x if is_stored(x) else view_windows(x, len(self), self._length, self._stride)

    def _read_stored(self, x: Any, indices: np.ndarray) -> np.ndarray:
        rows, where = read_ranges(x, indices * self._stride, np.full_like(indices, self._length))
        if len(rows) == 0:
            return rows.reshape(0, self._length, *rows.shape[1:])
        return read_rows(view_windows(rows, len(rows) - self._length + 1, self._length, 1), where)


def view_windows(x: np.ndarray, count: int, length: int, stride: int) -> np.ndarray:
    """View `count` windows of the rows of an array [T, ...] as [count, length, ...], read-only."""
    step, *rest = x.strides
    shape = (count, length, *x.shape[1:])
    return np.lib.stride_tricks.as_strided(x, shape, (stride * step, step, *rest), writeable=False)
