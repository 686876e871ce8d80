"""Records along the first axis of arrays: in memory, memory-mapped, or in an h5py or zarr file."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from penstock.data.tree import Batch, leaves_with_names, to_numpy


def is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and hasattr(leaf, "__getitem__")


class ArraySource:
    """A pytree of arrays [N, ...] of one length N; a batch is one gather per array.

    Attributes:
      gathers: whether a read only copies rows from memory, or memory-mapped files.

    Raises:
      TypeError: a leaf that is no array, a masked array, or an array of dtype object.
      ValueError: no leading dimension, length 0, or unequal lengths.
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
        self.arrays = jax.tree.map(_in_reach, arrays)
        self.gathers = not any(map(_is_stored, jax.tree_util.tree_leaves(self.arrays)))
        self._spec = ", ".join(f"{name}: {leaf.dtype}[{','.join(['N', *map(str, leaf.shape[1:])])}]" for name, leaf in named)

    def __len__(self) -> int:
        return self._records

    def read(self, indices: np.ndarray) -> Batch:
        arrays, treedef = jax.tree_util.tree_flatten(self.arrays)
        return jax.tree_util.tree_unflatten(treedef, [_read(x, indices) for x in arrays])

    def describe(self) -> str:
        return self._spec

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"arrays": jax.tree.map(_by_path, self.arrays)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state | {"arrays": jax.tree.map(_opened, state["arrays"])}


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


def _in_reach(x: Any) -> Any:
    return x if _is_stored(x) or isinstance(x, np.ndarray) else np.asarray(to_numpy(x))


def _read(x: Any, indices: np.ndarray) -> np.ndarray:
    if _is_stored(x):
        return _read_stored(x, indices)
    # `take` is faster, but first makes a contiguous copy of all that is not. Rows of a memmap are in memory, but
    # still of its class until they are viewed as an array.
    return np.asarray(x.take(indices, axis=0) if x.flags.c_contiguous else x[indices])


def _is_stored(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] in ("h5py", "zarr")


def _read_stored(x: Any, indices: np.ndarray) -> np.ndarray:
    """Rows of an h5py or zarr array: sorted, each once, neighbours in one read.

    Both formats read whole chunks and want increasing indices, so the order is restored afterwards.
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
    """Stands for an array in a file when a source is sent to another process: the file is opened there."""

    def __init__(self, opener: str, *args: Any):
        self.opener, self.args = opener, args

    def open(self) -> Any:
        if self.opener == "memmap":
            path, dtype, offset, shape = self.args
            return np.memmap(path, dtype, "r", offset, shape)
        import h5py

        path, name = self.args
        return h5py.File(path, "r")[name]


def _by_path(x: Any) -> Any:
    if type(x).__module__.partition(".")[0] == "h5py":
        if x.file.mode != "r":
            raise ValueError(
                f"{x.file.filename!r} is open for writing (mode {x.file.mode!r}), so no other process can read it: close it, "
                "and open it again with h5py.File(path, 'r')"
            )
        return _ByPath("h5py", x.file.filename, x.name)
    if not isinstance(x, np.memmap):
        return x
    # What was written to a copy-on-write map is in this process alone, and not in the file.
    if x.filename is not None and x.flags.c_contiguous and x.mode != "c":
        whole = x
        while isinstance(whole.base, np.memmap):
            whole = whole.base
        # A view keeps the offset of the map it was cut from, so its own is counted from the addresses.
        offset = whole.offset + x.ctypes.data - whole.ctypes.data
        return _ByPath("memmap", x.filename, x.dtype, offset, x.shape)
    return np.asarray(x)


def _opened(x: Any) -> Any:
    return x.open() if isinstance(x, _ByPath) else x
