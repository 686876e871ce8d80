"""The order of the records: a permutation of each epoch that is computed, and never stored.

A seed, an epoch and positions go in; record indices come out.

The order of an epoch is a keyed permutation of `0 … records-1` that is evaluated only at the positions that a batch needs. So its
memory does not depend on the number of records, and step 10^9 costs as much as step 0. The permutation is a Feistel network (Luby
& Rackoff, 1988), which is a bijection for any round function, on a rectangle of `rows × 2^k` cells that is just large enough for
the records. A position that lands on a cell beyond the last record goes through the network again until it does not ("cycle
walking": Black & Rogaway, 2002). The result is still a bijection.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

Remainder = Literal["drop", "pad", "keep"]

# With twelve rounds, all orders of tiny data sets (n <= 6) are equally likely by a chi-square test. With fewer rounds they are
# not, because each half of a position has only two or three values. Six rounds suffice where the halves are larger.
_ROUNDS, _FEW_ROUNDS, _FEW_ROUNDS_FROM = 12, 6, 4096

# Up to this number of records, words of 32 bits are used, which take a third of the time. Their hash has 16 bits, which are
# scaled to at most 2^12 rows. So some rows are hit by 17 hash values and others by 16, and six rounds even this out.
_NARROW = 1 << 24

# By bytes of a word. 4: the finaliser of MurmurHash3 (Appleby, 2011). 8: constants of splitmix64 (Vigna, 2015) and PCG (O'Neill,
# 2014).
_MULTIPLIERS = {
    4: (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)),
    8: (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)),
}

# Positions that are permuted at a time: enough to hide the overhead of NumPy calls, and few enough for the L2 cache.
_BLOCK = 32768


def epoch_keys(seed: int, epoch: int) -> np.ndarray:
    """Derive the round keys, uint64 [12], of the permutation of one epoch."""
    return np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)


def permute(positions: np.ndarray, records: int, keys: np.ndarray) -> np.ndarray:
    """Map positions to record indices by the permutation that `keys` select.

    Args:
      positions: integers [N] in `[0, records)`.
      records: size of the permuted range, at most 2^62.
      keys: uint64 [12], from `epoch_keys`.

    Returns:
      int64 [N]; distinct positions give distinct indices in `[0, records)`.

    Example:
      >>> sorted(permute(np.arange(5), 5, epoch_keys(seed=0, epoch=0)).tolist())
      [0, 1, 2, 3, 4]
    """
    # 2^k is about the square root of `records`, so at most one in 2^k positions has to walk.
    k = (records - 1).bit_length() // 2
    rows = -(-records >> k)
    word = np.uint32 if records <= _NARROW else np.uint64
    rounds = (keys if records < _FEW_ROUNDS_FROM else keys[:_FEW_ROUNDS]).astype(word)
    x = _feistel(positions.astype(word), rows, k, rounds)
    outside = np.flatnonzero(x >= records)
    while outside.size:
        x[outside] = _feistel(x[outside], rows, k, rounds)
        outside = outside[x[outside] >= records]
    return x.astype(np.int64)


def _feistel(x: np.ndarray, rows: int, k: int, keys: np.ndarray) -> np.ndarray:
    """Apply a bijection on `[0, rows · 2^k)`: in turn, change the row by a hash of the column and the column by one of the row.

    `rows` and `2^k` are at most `2^(w/2)` for words of w bits.
    """
    word: Any = x.dtype.type
    shift, columns, height, half = word(k), word((1 << k) - 1), word(rows), word(x.itemsize * 4)
    row, column = x >> shift, x & columns
    for r, key in enumerate(keys):
        if r % 2 == 0:
            # A hash of w/2 bits scaled to [0, rows) (Lemire, 2019).
            change = _hash(column + key, half)
            change *= height
            change >>= half
            row += change
            np.minimum(row, row - height, out=row)  # modulo `rows`: a negative difference wraps around to a large number
        else:
            change = _hash(row + key, half)
            change &= columns
            column ^= change
    row <<= shift
    row |= column
    return row


def _hash(z: np.ndarray, half: np.unsignedinteger) -> np.ndarray:
    """Hash each word of w bits to w/2 bits, in place, by one multiply-xorshift round."""
    first, second = _MULTIPLIERS[z.itemsize]
    z *= first
    z ^= z >> half
    z *= second
    z >>= half
    return z


@dataclass(frozen=True)
class _Block:
    """The record indices of some consecutive steps of one epoch, int64 [steps, rows].

    Attributes:
      key: (epoch, number of the block, start, stop).
    """

    key: tuple[int, int, int, int]
    indices: np.ndarray


@dataclass
class Order:
    """The record indices of any rows of any global batch.

    Steps are numbered through all epochs: step `k` is batch `k % steps_per_epoch` of epoch `k // steps_per_epoch`. With
    `remainder="drop"`, each epoch leaves out the records at its last positions. In a shuffled order, these are different records
    in each epoch.

    Attributes:
      records: number of records.
      batch_size: rows of a global batch.
      shuffle: whether each epoch has an order of its own, rather than that of the storage.
      seed: selects the orders.
      remainder: what happens to the last records of an epoch, see `Loader`.
    """

    records: int
    batch_size: int
    shuffle: bool
    seed: int
    remainder: Remainder
    _last: _Block | None = field(default=None, repr=False, compare=False)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Count the global batches of an epoch."""
        full, rest = divmod(self.records, self.batch_size)
        return full + (rest > 0 and self.remainder != "drop")

    def rows(self, step: int) -> int:
        """Count the records of the global batch `step`: `batch_size`, or fewer at the end of an epoch."""
        start = (step % self.steps_per_epoch) * self.batch_size
        return min(self.batch_size, self.records - start)

    def indices(self, step: int, start: int, stop: int) -> np.ndarray:
        """Return the record indices, int64 [stop - start], of the rows `start … stop <= rows(step)` of a global batch."""
        epoch, k = divmod(step, self.steps_per_epoch)
        if not self.shuffle:
            first = k * self.batch_size
            return np.arange(first + start, first + stop, dtype=np.int64)
        # Consecutive steps are usually requested in turn, so a block of steps is permuted at once. Several threads may replace
        # `_last` at the same time. Each thread uses the block that it read or computed itself, so the race is harmless.
        steps = max(1, _BLOCK // max(1, stop - start))
        key = (epoch, k // steps, start, stop)
        block = self._last
        if block is None or block.key != key:
            block = self._last = _Block(key, self._permuted(epoch, k // steps * steps, steps, start, stop))
        return block.indices[k % steps].copy()  # a source may return the indices as data, which a transform may write to

    def _permuted(self, epoch: int, first: int, steps: int, start: int, stop: int) -> np.ndarray:
        batches = np.arange(first, min(first + steps, self.steps_per_epoch), dtype=np.int64)
        positions = batches[:, None] * self.batch_size + np.arange(start, stop, dtype=np.int64)
        # The block may extend past the end of a short last batch. The rows of that batch are requested with another key, so these
        # positions are clipped only to keep them in the domain of the permutation.
        inside = np.minimum(positions, self.records - 1).ravel()
        return permute(inside, self.records, epoch_keys(self.seed, epoch)).reshape(positions.shape)
