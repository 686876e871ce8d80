"""Find functions that write a batch, or a record, into the memory of an earlier one, whose values are then lost.

The batches of a run go in; an error comes out if one of the first few shares memory with the first, and has changed it. The
first batch is kept for the comparison, so its memory cannot be given to another array. A constant that every batch shares is
allowed. After the first few batches, nothing is done.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from penstock.data.tree import Batch, Record, leaves_with_names

_BATCHES = 8  # that are compared: a function may have several buffers, and fill them in turn


@dataclass(frozen=True)
class _First:
    """The first batch of a run.

    Attributes:
      step: its number.
      leaves: its arrays in memory, by name, each with a checksum of its values.
    """

    step: int
    leaves: dict[str, tuple[np.ndarray, int]]


class ReuseCheck:
    """A check of the first batches of a run. Several threads may call it."""

    def __init__(self) -> None:
        self._first: _First | None = None
        self._left = _BATCHES

    def __call__(self, step: int, batch: Batch, function: str) -> None:
        """Compare a batch with the first one.

        Args:
          step: number of the batch.
          batch: a pytree of arrays.
          function: name of the function that made it, for the error.

        Raises:
          ValueError: the function wrote to an array of the first batch.
        """
        if self._left <= 0:
            return
        self._left -= 1
        arrays = {name: leaf for name, leaf in leaves_with_names(batch) if isinstance(leaf, np.ndarray)}
        first = self._first
        if first is None:
            self._first = _First(step, {name: (leaf, _checksum(leaf)) for name, leaf in arrays.items()})
            return
        for name, leaf in arrays.items():
            old, checksum = first.leaves.get(name, (None, 0))
            if old is not None and np.may_share_memory(old, leaf) and _checksum(old) != checksum:
                self._left = _BATCHES  # so that the next one is refused too
                raise ValueError(
                    f"batch {step}: {function} returned leaf {name!r} in the memory of batch {first.step}, whose values have "
                    "changed since then. Batches are made ahead of time, so earlier ones may still be needed: return a new array "
                    "each time (without out=), or a copy"
                )
        if not self._left:
            self._first = None


class RecordReuseCheck:
    """A check that a function of one record does not write to what it returned for the record before, in the first batches."""

    def __init__(self) -> None:
        self._left = _BATCHES

    def copies(self, record: Record) -> list[tuple[str, np.ndarray, bytes]]:
        """Return the arrays of the first record of a batch, by name, each with a copy of its values."""
        if self._left <= 0:
            return []
        self._left -= 1
        arrays = [(name, leaf) for name, leaf in leaves_with_names(record) if type(leaf) is np.ndarray]
        return [(name, leaf, leaf.tobytes()) for name, leaf in arrays if not leaf.dtype.hasobject]

    def compare(self, copies: list[tuple[str, np.ndarray, bytes]]) -> None:
        """Compare the first record with its copy, after the function has returned the second.

        Raises:
          ValueError: the function has written to it.
        """
        for name, leaf, values in copies:
            if leaf.tobytes() != values:
                self._left = _BATCHES  # so that the next batch is refused too
                raise ValueError(
                    f"the function of ps.per_record wrote to leaf {name!r} that it had returned for the record before, so the "
                    "records of a batch would have the same values: return a new array each time (without out=), or a copy"
                )


def _checksum(array: np.ndarray) -> int:
    return 0 if array.dtype.hasobject else zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
