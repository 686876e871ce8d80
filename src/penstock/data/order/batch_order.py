"""Compute which record is at each position of an epoch, and which positions make up a batch, from a seed and a step.

Nothing is stored: all is computed for the positions that a batch needs, so step 10^9 costs as much as step 0. A `RecordSequence`
says which record is at a position: `Shuffled` and `Weighted` here, `MixedSequence` in `mixture`. `Order` cuts the positions into
batches.

`Weighted` draws records by systematic sampling (Madow & Madow, 1944): the weights are laid end to end, and N equally spaced
points are placed on them. So a record with the share w of all weights is drawn ⌊N·w⌋ or ⌈N·w⌉ times an epoch. A permutation of
the points gives the order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np

from penstock.data.order.permutation import epoch_keys, permute
from penstock.data.order.rows import Ranges, Rows

Remainder = Literal["drop", "pad", "keep"]

_Key = tuple[int, int, Ranges]

# Positions that are computed at a time: enough to hide the overhead of NumPy calls, and few enough for the L2 cache.
_BLOCK = 65536


class RecordSequence(Protocol):
    """The records of a training run in their order."""

    @property
    def records(self) -> int:
        """Return the number of positions in an epoch."""

    def at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the record indices, int64 [...], at positions, int64 [...] in `[0, records)`, of one epoch."""

    def fingerprint(self) -> Mapping[str, Any]:
        """Return the options that decide the order, beside the number of records and the batch size."""


@dataclass(frozen=True)
class Shuffled:
    """The order of one source: each record once an epoch.

    Attributes:
      shuffle: whether each epoch has an order of its own, rather than the order of storage.
      seed: selects the orders.
    """

    records: int
    shuffle: bool
    seed: int

    def at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return permute(positions, self.records, epoch_keys(self.seed, epoch)) if self.shuffle else positions

    def fingerprint(self) -> Mapping[str, Any]:
        return {"shuffle": self.shuffle, "seed": self.seed}


@dataclass(frozen=True)
class Block:
    """The record indices of some consecutive steps of one epoch."""

    key: _Key  # epoch, number of the block, ranges of rows that are read
    indices: np.ndarray  # int64 [steps, n], for the n rows of each batch that are read; padding repeats the last record
    longest: np.ndarray | None  # int64 [steps], the largest length in each global batch; None if lengths are unknown


@dataclass
class Order:
    """The record indices of any rows of any global batch.

    Steps are numbered through all epochs: step `k` is batch `k % steps_per_epoch` of epoch `k // steps_per_epoch`. With
    `remainder="drop"`, each epoch leaves out the records at its last positions. In a shuffled order, these are different records
    in each epoch.

    With `lengths`, the records of a window of batches are sorted by length before they are cut into batches. So a batch has
    records of similar length. The batches of the window are then put in a random order, if the records are.

    Attributes:
      sequence: the record at each position.
      batch_size: rows of a global batch.
      remainder: what happens to the last records of an epoch, see `Loader`.
      lengths: integers [records of the source], the length of each record; None to keep the order of the sequence.
      window: number of batches that are sorted together.
      seed: selects the order of the batches in a window; None to keep them sorted.
    """

    sequence: RecordSequence
    batch_size: int
    remainder: Remainder
    lengths: np.ndarray | None = None
    window: int = 1
    seed: int | None = None
    _last: Block | None = field(default=None, repr=False, compare=False)

    @property
    def records(self) -> int:
        """Return the number of positions in an epoch."""
        return self.sequence.records

    @cached_property
    def steps_per_epoch(self) -> int:
        """Count the global batches of an epoch."""
        full, rest = divmod(self.records, self.batch_size)
        return full + (rest > 0 and self.remainder != "drop")

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """Return the different numbers of rows of global batches, with the padding; the usual one first."""
        ends = (0, self.steps_per_epoch - 1) if self.remainder == "keep" and self.steps_per_epoch else ()
        return tuple(dict.fromkeys(self.rows(k) for k in ends)) or (self.batch_size,)

    def rows(self, step: int) -> int:
        """Count the records of the global batch `step`: `batch_size`, or fewer at the end of an epoch."""
        start = (step % self.steps_per_epoch) * self.batch_size
        return min(self.batch_size, self.records - start)

    def padded_rows(self, step: int) -> int:
        """Count the rows of the global batch `step`, with the padding."""
        return self.batch_size if self.remainder == "pad" else self.rows(step)

    def longest(self, step: int, rows: Rows) -> int | None:
        """Return the largest length of a record in the global batch `step`; None if lengths are unknown."""
        block, k = self.block(step, rows)
        return None if block.longest is None else int(block.longest[k])

    def fingerprint(self) -> dict[str, Any]:
        """Return the options that decide which records a step holds, beside the source."""
        sizes = {"records": self.records, "batch_size": self.batch_size}
        length = {} if self.lengths is None else {"batch_by_length": digest(self.lengths)}
        return {**sizes, **self.sequence.fingerprint(), "remainder": self.remainder, **length}

    def block(self, step: int, rows: Rows) -> tuple[Block, int]:
        """Return a block of steps with `step` in it, and the number of the step in the block."""
        # Consecutive steps are usually requested in turn, so a block of steps is computed at once. Several threads may replace
        # `_last` at the same time. Each thread uses the block that it read or computed itself, so the race is harmless.
        epoch, k = divmod(step, self.steps_per_epoch)
        size = self.padded_rows(step)
        numbers = rows.numbers(size)
        steps = self.window if self.lengths is not None else max(1, _BLOCK // len(numbers))
        key = (epoch, k // steps, rows.ranges[size])
        block = self._last
        if block is None or block.key != key:
            first = k // steps * steps
            block = self._last = self._computed(key, first, min(first + steps, self.steps_per_epoch), numbers)
        return block, k % steps

    def _computed(self, key: _Key, first: int, stop: int, numbers: np.ndarray) -> Block:
        """Compute the steps `first … stop - 1` of an epoch."""
        columns = numbers if self.lengths is None else np.arange(self.batch_size)
        positions = np.arange(first, stop, dtype=np.int64)[:, None] * self.batch_size + columns
        # Rows past the end of the epoch are padding, which repeats the last record. Or they belong to a short last batch, whose
        # rows are requested with another key.
        indices = self.sequence.at(key[0], np.minimum(positions, self.records - 1))
        if self.lengths is None:
            return Block(key, indices, None)
        return self._by_length(key, first, indices, numbers)

    def _by_length(self, key: _Key, first: int, indices: np.ndarray, numbers: np.ndarray) -> Block:
        """Sort the records of a window, int64 [steps, batch_size], by length."""
        assert self.lengths is not None
        real = min(indices.size, self.records - first * self.batch_size)
        flat = indices.reshape(-1)
        # The longest come first. So a short last batch has the shortest records, and stays the last.
        flat[:real] = flat[np.argsort(-self.lengths[flat[:real]], kind="stable")]
        flat[real:] = flat[real - 1]
        full = real // self.batch_size
        if self.seed is not None and full > 1:
            keys = epoch_keys(self.seed, key[0]) + np.uint64(key[1])
            indices[:full] = indices[permute(np.arange(full), full, keys)]
        longest = self.lengths[indices].max(axis=1)
        return Block(key, np.ascontiguousarray(indices[:, numbers]), longest)


def digest(numbers: np.ndarray) -> str:
    """Return a hash of an array, to be compared with the hash of another run."""
    import hashlib

    return hashlib.blake2b(np.ascontiguousarray(numbers, np.dtype(numbers.dtype).newbyteorder("<")), digest_size=8).hexdigest()


class Weighted:
    """The order of one source whose records are drawn by weight.

    Args:
      weights: numbers [N] >= 0, one for each record; their sum may be anything above 0.
      records: N, which is also the number of draws in an epoch.
      seed: selects the draws and their order.
    """

    def __init__(self, weights: Any, records: int, seed: int):
        self.records, self.seed = records, seed
        given = np.asarray(weights)
        if given.dtype.kind not in "fiub":
            raise TypeError(f"weights are {given.dtype}, and need to be numbers, one for each record")
        if given.shape != (records,):
            raise ValueError(f"weights have the shape {given.shape}, and there are {records:,} records: give one weight for each")
        if wrong := np.flatnonzero(~(np.isfinite(given) & (given >= 0))).tolist():
            raise ValueError(
                f"weights[{wrong[0]}] = {given[wrong[0]]}: weights need to be finite and >= 0"
                + (f"; {len(wrong):,} of them are not" if len(wrong) > 1 else "")
            )
        if not given.any():
            raise ValueError("all weights are 0, so no record can be drawn")
        self._ends = np.cumsum(given / given.max(), dtype=np.float64)  # scaled, so that the sum cannot overflow
        self._last = int(np.flatnonzero(given)[-1])
        self._digest = digest(given.astype(np.float64))

    def at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        keys = epoch_keys(self.seed, epoch)
        offset = float(keys[-1] >> np.uint64(11)) * 2.0**-53  # in [0, 1), one for all points of the epoch
        points = (permute(positions, self.records, keys) + offset) * (self._ends[-1] / self.records)
        # Rounding may put the last point on the end of the weights.
        return np.minimum(np.searchsorted(self._ends, points, side="right"), self._last).astype(np.int64)

    def fingerprint(self) -> Mapping[str, Any]:
        """Return the options, with a hash of the weights."""
        return {"shuffle": True, "seed": self.seed, "weights": self._digest}
