"""A source over arrays whose first dimension is the record: in memory, memory-mapped, or in an h5py or zarr file.

Arrays [N, ...] and record indices int64 [n] go in, arrays [n, ...] come out: one gather for each array.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

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
        self.is_gather = not any(map(_is_stored, jax.tree_util.tree_leaves(self.arrays)))
        self._spec = ", ".join(f"{name}: {leaf.dtype}[{','.join(['N', *map(str, leaf.shape[1:])])}]" for name, leaf in named)

    def __len__(self) -> int:
        """Return the number of records."""
        return self._records

    def read(self, indices: np.ndarray) -> Batch:
        """Return new arrays [n, ...] with the records at int64 [n]."""
        arrays, treedef = jax.tree_util.tree_flatten(self.arrays)
        return jax.tree_util.tree_unflatten(treedef, [_read(x, indices) for x in arrays])

    def describe(self) -> str:
        """Return names, dtypes and shapes of the arrays, without their length, as "x: int32[N]"."""
        return self._spec

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"arrays": jax.tree.map(_to_path, self.arrays)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state | {"arrays": jax.tree.map(_from_path, state["arrays"])}


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
    return x if _is_stored(x) or isinstance(x, np.ndarray) else np.asarray(to_numpy(x))


def _read(x: Any, indices: np.ndarray) -> np.ndarray:
    if _is_stored(x):
        return _read_stored(x, indices)
    # `take` is faster, but it first copies the whole array if that is not contiguous. Rows taken from a memmap lie in memory,
    # but have the class memmap until they are viewed as an array.
    return np.asarray(x.take(indices, axis=0) if x.flags.c_contiguous else x[indices])


def _is_stored(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] in ("h5py", "zarr")


def _read_stored(x: Any, indices: np.ndarray) -> np.ndarray:
    """Read rows of an h5py or zarr array: in increasing order, each once, and consecutive rows in one read.

    Both formats read complete chunks and need increasing indices. The requested order is restored afterwards.
    """
    rows, where = np.unique(indices, return_inverse=True)
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    out = np.empty((len(rows), *x.shape[1:]), x.dtype)
    at = 0
    for run in np.split(rows, breaks):
        out[at : at + len(run)] = x[int(run[0]) : int(run[-1]) + 1]
        at += len(run)
    return out if _is_range(indices) else out[where]


def _is_range(indices: np.ndarray) -> bool:
    return bool(np.all(np.diff(indices) == 1))


class _ByPath:
    """A path that replaces an array in a file when a source is pickled. The receiving process opens the file."""

    def __init__(self, opener: str, *args: Any):
        self.opener, self.args = opener, args

    def open(self) -> Any:
        """Open the file and return the array."""
        if self.opener == "memmap":
            path, dtype, offset, shape = self.args
            return np.memmap(path, dtype, "r", offset, shape)
        import h5py

        path, name = self.args
        return h5py.File(path, "r")[name]


def _to_path(x: Any) -> Any:
    """Replace an array in a file by its path; return any other array as it is."""
    if type(x).__module__.partition(".")[0] == "h5py":
        if x.file.mode != "r":
            raise ValueError(
                f"{x.file.filename!r} is open for writing (mode {x.file.mode!r}), so no other process can read it: close it, "
                "and open it again with h5py.File(path, 'r')"
            )
        return _ByPath("h5py", x.file.filename, x.name)
    if not isinstance(x, np.memmap):
        return x
    # Values written to a copy-on-write map (mode "c") are in the memory of this process, and not in the file.
    if x.filename is not None and x.flags.c_contiguous and x.mode != "c":
        root = x
        while isinstance(root.base, np.memmap):
            root = root.base
        # The `offset` of a view is that of the map it was sliced from, so the distance of their addresses is added.
        offset = root.offset + x.ctypes.data - root.ctypes.data
        return _ByPath("memmap", x.filename, x.dtype, offset, x.shape)
    return np.asarray(x)


def _from_path(x: Any) -> Any:
    """Open the file of a replaced array; return any other array as it is."""
    return x.open() if isinstance(x, _ByPath) else x
