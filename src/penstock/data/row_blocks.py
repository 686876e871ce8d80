"""Rows in several blocks of memory, gathered in one call of NumPy.

Arrays [N_i, ...] go in; the rows at some indices, which count through all arrays, come out in one new array. Gathering from each
array by itself and putting the parts together would copy each row twice, and would take some calls for each array.

Method. All memory of the process is one row of bytes. A view of it whose elements are as long as a row of the arrays, and begin
at each byte, has the row at the address `lowest + i` as its element i. So one gather from this view reads rows of any array.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class RowBlocks:
    """Rows of equal size in several blocks of memory, which are read as one array.

    Args:
      blocks: arrays [N_i, ...], N_i > 0, of one dtype and row shape. Each row is contiguous; rows may overlap, as windows do.

    Attributes:
      blocks: the arrays.
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
        """Return the number of the block that holds each row, int64 [n].

        Raises:
          IndexError: there is no such row.
        """
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
        """Return where rows lie, int64 [...], for `read`. To find many at once takes less time than a few at a time.

        Args:
          indices: int64 [...], the rows.

        Raises:
          IndexError: there is no such row.
        """
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
    """A stretch of memory as NumPy's array interface describes it: elements of some type that begin every `step` bytes.

    Args:
      owner: what keeps the memory.
    """

    def __init__(self, address: int, length: int, step: int, typestr: str, owner: object):
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),  # read-only
            "shape": (length,),
            "strides": (step,),
            "typestr": typestr,
        }
