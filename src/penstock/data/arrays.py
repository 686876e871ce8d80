"""A source over arrays whose first dimension is the record: in memory, memory-mapped, or in an h5py or zarr file.

Arrays [N, ...] and record indices int64 [n] go in, arrays [n, ...] come out: one gather for each array.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from penstock.data.array_pickling import from_picklable, to_picklable
from penstock.data.row_blocks import RowBlocks
from penstock.data.tree import Batch, leaves_with_names, to_numpy


def is_array(leaf: Any) -> bool:
    """Return whether a leaf has a shape, a dtype and indexing, as arrays of NumPy, JAX, torch, h5py and zarr do."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and hasattr(leaf, "__getitem__")


class ArraySource:
    """A source over a pytree of arrays [N, ...] that all have the length N. A read is one gather for each array.

    Args:
      arrays: the pytree. Arrays that are not NumPy's, h5py's or zarr's are converted to NumPy once, here.

    Attributes:
      is_gather: whether `read` only copies rows from memory or from memory-mapped files.

    Raises:
      TypeError: a leaf is not an array, is a masked array, or has the dtype object.
      ValueError: a leaf has no leading dimension; the length is 0; the lengths differ.
    """

    def __init__(self, arrays: Any):
        named = leaves_with_names(arrays)
        for name, leaf in named:
            _check_leaf(name, leaf)
        lengths = {name: leaf.shape[0] for name, leaf in named}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name!r} has {n:,}" for name, n in lengths.items())
            raise ValueError(f"arrays of unequal length: {listed}; all need one row for each record")
        if not all(lengths.values()):
            raise ValueError(f"no records: {', '.join(map(repr, lengths))} of length 0")
        self._records = named[0][1].shape[0]
        self.arrays = jax.tree.map(_to_readable, arrays)
        self._leaves, self._structure = jax.tree_util.tree_flatten(self.arrays)
        self.is_gather = not any(map(is_stored, self._leaves))
        self._spec = ", ".join(f"{name}: {leaf.dtype}[{','.join(['N', *map(str, leaf.shape[1:])])}]" for name, leaf in named)

    def __len__(self) -> int:
        """Return the number of records."""
        return self._records

    def read(self, indices: np.ndarray) -> Batch:
        """Return new arrays [n, ...] with the records at int64 [n]."""
        return jax.tree_util.tree_unflatten(self._structure, [read_rows(x, indices) for x in self._leaves])

    def row_blocks(self) -> Any:
        """Return a pytree of the rows of each array; None if they do not lie in memory, each in one piece."""
        return row_blocks(self.arrays)

    def describe(self) -> str:
        """Return names, dtypes and shapes of the arrays, without their length, as "x: int32[N]"."""
        return self._spec

    def __getstate__(self) -> dict[str, Any]:
        parts = {name: value for name, value in self.__dict__.items() if name not in ("_leaves", "_structure")}
        return parts | {"arrays": to_picklable(self.arrays)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state | {"arrays": from_picklable(state["arrays"])}
        self._leaves, self._structure = jax.tree_util.tree_flatten(self.arrays)


def _check_leaf(name: str, leaf: Any) -> None:
    if not is_array(leaf):
        raise TypeError(
            f"leaf {name!r} is {type(leaf).__name__}, not an array: a dict or tuple given to Loader holds "
            "one array a field (np.asarray(...)); a sequence of records is given as a list"
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(f"leaf {name!r} is a masked array, and a batch has no mask for it: give {name}.filled(value)")
    if leaf.dtype == object:
        first = f", first element {type(leaf.flat[0]).__name__}" if isinstance(leaf, np.ndarray) and leaf.size else ""
        raise TypeError(
            f"leaf {name!r} has dtype object{first}: no device can hold it. Give ragged or raw data as a list "
            "of records, with collate=ps.pad_to(...) or transform=ps.per_record(...) to make arrays of it"
        )
    if len(leaf.shape) == 0:
        raise ValueError(f"leaf {name!r} is a scalar; it needs a leading dimension with one row for each record")


def _to_readable(x: Any) -> Any:
    """Convert an array to NumPy, unless it is one or lies in an h5py or zarr file."""
    return x if is_stored(x) or isinstance(x, np.ndarray) else np.asarray(to_numpy(x))


def read_rows(x: Any, indices: np.ndarray) -> np.ndarray:
    """Return a new array [n, ...] with the rows at int64 [n] of an array of NumPy, h5py or zarr."""
    if not isinstance(x, np.ndarray):
        rows, where = read_ranges(x, indices, np.ones_like(indices))
        return rows if _is_range(where) else rows[where]
    # `take` is faster, but it first copies the whole array if that is not contiguous. Rows taken from a memmap lie in memory,
    # but have the class memmap until they are viewed as an array.
    return np.asarray(x.take(indices, 0) if x.flags.c_contiguous else x[indices])


def row_blocks(arrays: Any) -> Any:
    """Make `RowBlocks` of each array of a pytree; None if one of them is stored, or a row of it is not contiguous."""
    leaves = jax.tree_util.tree_leaves(arrays)
    if not all(isinstance(x, np.ndarray) and x[0].flags.c_contiguous for x in leaves):
        return None
    return jax.tree.map(lambda x: RowBlocks([x]), arrays)


def is_stored(x: Any) -> bool:
    """Tell whether an array lies in an h5py or zarr file."""
    return type(x).__module__.partition(".")[0] in ("h5py", "zarr")


def read_ranges(x: Any, starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Read ranges of rows of an h5py or zarr array, in increasing order and each row once; ranges that touch are one read.

    Both formats read complete chunks and need increasing indices.

    Args:
      x: the array [N, ...].
      starts: int64 [n], the first row of each range, in any order.
      counts: int64 [n], the rows of each range, >= 1.

    Returns:
      (rows, where): the rows that were read, [m, ...], and for each range the place of its first row in them, int64 [n].
    """
    if len(starts) == 0:
        return np.empty((0, *x.shape[1:]), x.dtype), np.empty(0, np.int64)
    order = np.argsort(starts, kind="stable")
    begins = starts[order]
    reach = np.maximum.accumulate(begins + counts[order])
    first = np.r_[True, begins[1:] > reach[:-1]]  # the first range of each read
    run_begins, run_ends = begins[first], reach[np.r_[first[1:], True]]
    ends = np.cumsum(run_ends - run_begins)
    rows = np.empty((int(ends[-1]), *x.shape[1:]), x.dtype)
    for begin, end, at in zip(run_begins.tolist(), run_ends.tolist(), ends.tolist(), strict=True):
        rows[at - (end - begin) : at] = x[begin:end]
    where = np.empty(len(starts), np.int64)
    where[order] = begins + (ends - run_ends)[np.cumsum(first) - 1]
    return rows, where


def _is_range(indices: np.ndarray) -> bool:
    return len(indices) > 0 and indices[0] == 0 and bool(np.all(np.diff(indices) == 1))
