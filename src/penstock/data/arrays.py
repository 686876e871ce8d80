"""Read rows of arrays whose first dimension is the record: in memory, memory-mapped, or in an h5py or zarr file.

`RowBlocks` gathers rows from several blocks of memory in one call of NumPy. Gathering from each block by itself and putting the
parts together would copy each row twice, and would take some calls for each block. Instead, all memory from the lowest block to
the highest is viewed as one array. Its elements are as long as a row of the blocks, and one begins at each byte. So element i is
the row at the address `lowest + i`, and one gather reads rows of any block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from penstock.data.array_pickling import from_picklable, to_picklable
from penstock.data.records import RecordSource
from penstock.data.tree import Batch, Record, as_records, dense_form, is_key, is_sparse, leaves_with_names, to_numpy


def is_array(leaf: Any) -> bool:
    """Return whether a leaf has a shape and a dtype, as arrays of NumPy, JAX, torch, h5py and zarr do, sparse ones too."""
    if is_closed(leaf):
        return False
    return bool(dense_form(leaf)) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


class ArraySource:
    """A source over a pytree of arrays [N, ...] that all have the length N. A read is one gather for each array.

    Args:
      arrays: the pytree. Arrays that are not NumPy's, h5py's or zarr's are converted to NumPy once, here.
      spec: a description of them before they were converted, for the saved state of a feed; None makes it.

    Attributes:
      is_gather: whether `read` only copies rows from memory or from memory-mapped files.

    Raises:
      TypeError: a leaf is not an array, is masked, sparse or ragged, or has the dtype object.
      ValueError: a leaf has no leading dimension; the length is 0; the lengths differ; a file is closed.
    """

    def __init__(self, arrays: Any, spec: str | None = None):
        self.arrays, named = _converted(arrays)
        if objects := next(((name, leaf) for name, leaf in named if leaf.dtype.hasobject), None):
            raise TypeError(_no_objects(*objects))
        self._records = named[0][1].shape[0]
        self._leaves, self._structure = jax.tree_util.tree_flatten(self.arrays)
        self.is_gather = not any(map(is_stored, self._leaves))
        self._spec = _spec(arrays) if spec is None else spec

    def __len__(self) -> int:
        """Return the number of records."""
        return self._records

    def read(self, indices: np.ndarray) -> Batch:
        """Return new arrays [n, ...] with the records at int64 [n]."""
        try:
            return jax.tree_util.tree_unflatten(self._structure, [read_rows(x, indices) for x in self._leaves])
        except ValueError:
            check_open(self.arrays)  # names the leaf
            raise

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


class ObjectRows:
    """The rows of a pytree of arrays [N, ...], of which some hold Python objects, as records for a function of the user."""

    def __init__(self, arrays: Any):
        self.arrays = arrays

    def __len__(self) -> int:
        return int(jax.tree_util.tree_leaves(self.arrays)[0].shape[0])

    def __getitems__(self, indices: list[int]) -> list[Record]:
        rows = np.array(indices, np.int64)
        try:
            return as_records(jax.tree.map(lambda x: read_rows(x, rows), self.arrays), len(rows))
        except ValueError:
            check_open(self.arrays)  # names the leaf
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {"arrays": to_picklable(self.arrays)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.arrays = from_picklable(state["arrays"])


def array_source(arrays: Any) -> ArraySource | RecordSource:
    """Return a source of a pytree of arrays: of batches, or of records if some arrays hold Python objects, such as texts."""
    converted, named = _converted(arrays)
    if any(leaf.dtype.hasobject for _, leaf in named):
        return RecordSource(ObjectRows(converted), _spec(arrays))
    return ArraySource(converted, _spec(arrays))  # converted once: JAX arrays are copied from their device


def refuse_objects(source: Any) -> None:
    """Raise TypeError if a source reads arrays that hold Python objects, and no function makes numbers of them."""
    rows = getattr(source, "records", None)
    if isinstance(rows, ObjectRows):
        raise TypeError(_no_objects(*next(each for each in leaves_with_names(rows.arrays) if each[1].dtype.hasobject)))


def _converted(arrays: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """Check arrays, and return them as arrays of NumPy, h5py or zarr: as the same pytree, and with their names."""
    named = [(name, _as_array(name, leaf)) for name, leaf in leaves_with_names(arrays, is_sparse)]
    lengths = {name: leaf.shape[0] for name, leaf in named}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name!r} has {n:,}" for name, n in lengths.items())
        raise ValueError(f"arrays of unequal length: {listed}; all need one row for each record")
    if not all(lengths.values()):
        raise ValueError(f"no records: {', '.join(map(repr, lengths))} of length 0")
    structure = jax.tree_util.tree_structure(arrays)
    return jax.tree_util.tree_unflatten(structure, [leaf for _, leaf in named]), named


def _as_array(name: str, leaf: Any) -> Any:
    check_open(leaf if name == "batch" else {name: leaf})
    if not is_array(leaf):
        raise TypeError(
            f"leaf {name!r} is {type(leaf).__name__}, not an array: a dict or tuple given to Loader holds one array a field "
            "(np.asarray(...)); a sequence of records is given as a list"
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(f"leaf {name!r} is a masked array, and a batch has no mask for it: give {name}.filled(value)")
    if is_key(leaf):
        raise TypeError(
            f"leaf {name!r} holds PRNG keys, which NumPy cannot hold: give their integers, jax.random.key_data({name}), and make "
            "keys of them in the transform of the feed, by jax.random.wrap_key_data"
        )
    try:
        array = leaf if isinstance(leaf, np.ndarray) or is_stored(leaf) else np.asanyarray(to_numpy(leaf))
    except (TypeError, ValueError) as error:
        raise TypeError(f"leaf {name!r} is {error}") from error
    if len(array.shape) == 0:
        raise ValueError(f"leaf {name!r} is a scalar; it needs a leading dimension with one row for each record")
    return array


def _no_objects(name: str, leaf: Any) -> str:
    first = f", first element {type(leaf.flat[0]).__name__}" if isinstance(leaf, np.ndarray) and leaf.size else ""
    return (
        f"leaf {name!r} has dtype {leaf.dtype}{first}: no device can hold it. Make arrays of it with collate=ps.pad_to(...) or "
        "transform=ps.per_record(...), or leave it out"
    )


def _spec(arrays: Any) -> str:
    """Describe arrays by the dtypes that their library gives them, for the saved state of a feed."""
    named = leaves_with_names(arrays)
    return ", ".join(f"{name}: {leaf.dtype}[{','.join(['N', *map(str, leaf.shape[1:])])}]" for name, leaf in named)


def is_closed(x: Any) -> bool:
    """Return whether an object of h5py, or an .npz file, belongs to a file that is closed. It then answers no other question."""
    if isinstance(x, np.lib.npyio.NpzFile):
        return x.zip is None
    return type(x).__module__.partition(".")[0] == "h5py" and not x


def check_open(arrays: Any) -> None:
    """Raise ValueError if an array lies in a closed file."""
    for name, leaf in leaves_with_names(arrays):
        if is_closed(leaf):
            what = "the data lie" if leaf is arrays else f"leaf {name!r} lies"
            raise ValueError(
                f"{what} in a file that is closed: keep it open as long as the Loader and its feed read it, for example by "
                "reading inside of its `with` block"
            )


def read_rows(x: Any, indices: np.ndarray) -> np.ndarray:
    """Return a new array [n, ...] with the rows at int64 [n] of an array of NumPy, h5py or zarr."""
    if not isinstance(x, np.ndarray):
        rows, where = read_ranges(x, indices, np.ones_like(indices))
        in_order = len(where) > 0 and where[0] == 0 and bool(np.all(np.diff(where) == 1))
        return rows if in_order else rows[where]
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
      x: array [N, ...].
      starts: int64 [n], the first row of each range, in any order.
      counts: int64 [n], the rows of each range, >= 1.

    Returns:
      (rows, where): the rows that were read, [m, ...], and for each range the place of its first row in them, int64 [n].
    """
    check_open(x)
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


class RowBlocks:
    """Rows of equal size in several blocks of memory, which are read as one array.

    Args:
      blocks: arrays [N_i, ...], N_i > 0, of one dtype and row shape. Each row is contiguous; rows may overlap, as windows do.

    Attributes:
      starts: int64 [blocks + 1], the index of the first row of each block, and the number of all rows.
    """

    def __init__(self, blocks: Sequence[np.ndarray]):
        self.blocks = list(blocks)
        self.starts = np.cumsum([0, *map(len, blocks)])
        self._dtype, self._shape = blocks[0].dtype, blocks[0].shape[1:]
        self._array: np.ndarray | None = None  # holds all rows
        self._memory: np.ndarray | None = None  # None if no array can span the blocks
        size = blocks[0][:1].nbytes
        if size == 0:
            self._array = np.concatenate(self.blocks)
        elif len(blocks) == 1 and blocks[0].flags.c_contiguous:
            self._array = self.blocks[0]
        if self._array is not None:
            return
        addresses = np.array([block.ctypes.data for block in blocks])
        steps = np.array([block.strides[0] for block in blocks])
        lasts = addresses + (np.diff(self.starts) - 1) * steps
        lowest, highest = int(min(addresses.min(), lasts.min())), int(max(addresses.max(), lasts.max()))
        # Row i of all blocks has the place `i * step + shift` in the memory, with the step and the shift of its block.
        self._steps, self._shifts = steps, addresses - lowest - self.starts[:-1] * steps
        self._step = int(steps[0]) if (steps == steps[0]).all() else None
        if (highest - lowest + 1) * size <= np.iinfo(np.intp).max:  # a limit of NumPy: it counts overlapping elements in full
            self._memory = np.asarray(_Stretch(lowest, highest - lowest + 1, 1, f"|V{size}", self.blocks))

    def __len__(self) -> int:
        """Return the number of all rows."""
        return int(self.starts[-1])

    def block_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of the block that holds each row, int64 [n]. Raise IndexError if there is no such row."""
        if indices.size and indices.view(np.uint64).max() >= self.starts[-1]:  # a negative index is a large one without sign
            raise IndexError(f"rows {indices.min()} to {indices.max()} of {len(self):,}")
        return self.starts[1:-1].searchsorted(indices, side="right")

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Return a copy of the rows at int64 [n], as [n, ...].

        Raises:
          IndexError: there is no such row. Nothing outside of the blocks is ever read.
        """
        return self.read(self.places(indices))

    def places(self, indices: np.ndarray) -> np.ndarray:
        """Return where the rows at int64 [...] lie, for `read`. To find many at once takes less time than a few at a time."""
        if self._array is not None:
            return indices
        block = self.block_of(indices)
        if self._memory is None:
            return indices
        places = indices * (self._steps.take(block) if self._step is None else self._step)
        places += self._shifts.take(block)
        return places

    def read(self, places: np.ndarray) -> np.ndarray:
        """Return a copy of the rows at places, int64 [n], as [n, ...]."""
        if self._array is not None:
            return np.asarray(self._array.take(places, 0))
        if self._memory is None:
            return self._block_by_block(places)
        return self._memory[places].view(self._dtype).reshape(len(places), *self._shape)

    def _block_by_block(self, indices: np.ndarray) -> np.ndarray:
        out = np.empty((len(indices), *self._shape), self._dtype)
        block = self.block_of(indices)
        for number in np.unique(block).tolist():
            here = block == number
            out[here] = self.blocks[number][indices[here] - self.starts[number]]
        return out


def span(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray] | None:
    """View the memory from the first to the last of some arrays [N_i] as one array.

    Args:
      arrays: contiguous, of one dtype.

    Returns:
      (view, starts): the view, read-only, which keeps the arrays alive, and the place of each array in it, int64 [arrays].
      Elements between the arrays must not be read: they may be no memory at all. None if the arrays are not alike, or not aligned
      with each other.
    """
    first = arrays[0]
    if len({x.dtype for x in arrays}) > 1 or not all(x.flags.c_contiguous for x in arrays):
        return None
    addresses = np.array([x.ctypes.data for x in arrays])
    lowest = int(addresses.min())
    starts, remainders = np.divmod(addresses - lowest, first.itemsize)
    if remainders.any():
        return None
    length = int((starts + [len(x) for x in arrays]).max())
    return np.asarray(_Stretch(lowest, length, first.itemsize, first.dtype.str, list(arrays))).view(first.dtype), starts


class _Stretch:
    """A stretch of memory, which `owner` keeps, in NumPy's array interface: elements that begin every `step` bytes."""

    def __init__(self, address: int, length: int, step: int, typestr: str, owner: object):
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),  # read-only
            "shape": (length,),
            "strides": (step,),
            "typestr": typestr,
        }
