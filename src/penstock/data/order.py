"""Which record stands at which position of which epoch: computed, never stored.

An epoch's order is a keyed permutation of `0 … records-1`, evaluated only at the positions that a
batch needs, so memory does not depend on the number of records and step 10^9 costs what step 0
costs. The permutation is a Feistel network (Luby & Rackoff, 1988), which is a bijection whatever its
round function is, on a rectangle of `rows × 2^k` cells that is just large enough for the records. The
few positions that land on a cell too many are sent through it again until they do not ("cycle
walking": Black & Rogaway, 2002), which keeps it a bijection.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

Remainder = Literal["drop", "pad", "keep"]

# Twelve rounds make all orders of tiny data sets (n <= 6) equally likely by a chi-square test; fewer do
# not, because their halves have two or three values. Six are plenty where the halves are larger.
_ROUNDS, _FEW_ROUNDS, _FEW_ROUNDS_FROM = 12, 6, 4096

# Words of 32 bits take a third of the time. A hash of 16 bits scaled to the at most 2^12 rows of so many records
# hits no row 17 times as often as another 16 times, which six rounds even out.
_NARROW = 1 << 24

# By bytes of a word: of the finalisers of MurmurHash3 (Appleby, 2011), and of splitmix64 (Vigna, 2015) and PCG (O'Neill, 2014).
_MULTIPLIERS = {
    4: (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)),
    8: (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)),
}

# Positions permuted at a time: large enough to hide the cost of a NumPy call, small enough for L2.
_BLOCK = 32768


def epoch_keys(seed: int, epoch: int) -> np.ndarray:
    """Round keys, uint64 [12], of one epoch's permutation."""
    return np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)


def permute(positions: np.ndarray, records: int, keys: np.ndarray) -> np.ndarray:
    """Map positions to record indices by the permutation that `keys` select.

    Args:
      positions: integers [N] in `[0, records)`.
      records: size of the permuted range, at most 2^62.
      keys: uint64 [12], from `epoch_keys`.

    Returns:
      int64 [N]; distinct positions give distinct indices in `[0, records)`.
    """
    # 2^k is about the square root of the records, so at most one in that many positions has to walk.
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
    """A bijection on `[0, rows · 2^k)`: row and column in turn are moved by a hash of the other.

    `rows` and `2^k` are at most `2^(w/2)` for words of w bits.
    """
    word: Any = x.dtype.type
    shift, columns, height, half = word(k), word((1 << k) - 1), word(rows), word(x.itemsize * 4)
    row, column = x >> shift, x & columns
    for r, key in enumerate(keys):
        if r % 2 == 0:
            # A hash of w/2 bits scaled to [0, rows) (Lemire, 2019).
            move = _hash(column + key, half)
            move *= height
            move >>= half
            row += move
            np.minimum(row, row - height, out=row)  # modulo rows: the difference wraps around if it is negative
        else:
            move = _hash(row + key, half)
            move &= columns
            column ^= move
    row <<= shift
    row |= column
    return row


def _hash(z: np.ndarray, half: np.unsignedinteger) -> np.ndarray:
    """w/2 bits of each word of w bits, in place: one multiply-xorshift round."""
    first, second = _MULTIPLIERS[z.itemsize]
    z *= first
    z ^= z >> half
    z *= second
    z >>= half
    return z


@dataclass(frozen=True)
class _Block:
    """Record indices of some consecutive steps of one epoch, int64 [steps, rows]."""

    key: tuple[int, int, int, int]
    indices: np.ndarray


@dataclass
class Order:
    """Record indices of any rows of any global batch.

    Steps are numbered through all epochs: step `k` is batch `k % steps_per_epoch` of epoch
    `k // steps_per_epoch`. With `remainder="drop"` each epoch leaves out the records at its last
    positions, which are other records each epoch when the order is shuffled.
    """

    records: int
    batch_size: int
    shuffle: bool
    seed: int
    remainder: Remainder
    _last: _Block | None = field(default=None, repr=False, compare=False)

    @cached_property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(self.records, self.batch_size)
        return full + (rest > 0 and self.remainder != "drop")

    def rows(self, step: int) -> int:
        """Records in the global batch `step`: `batch_size`, or fewer at the end of an epoch."""
        start = (step % self.steps_per_epoch) * self.batch_size
        return min(self.batch_size, self.records - start)

    def indices(self, step: int, start: int, stop: int) -> np.ndarray:
        """Record indices, int64 [stop - start], of rows `start … stop <= rows(step)` of a global batch."""
        epoch, k = divmod(step, self.steps_per_epoch)
        if not self.shuffle:
            first = k * self.batch_size
            return np.arange(first + start, first + stop, dtype=np.int64)
        # Neighbouring steps are asked for together, so a block of them is permuted at once. Threads
        # may race to replace the block: each uses the one that it read or made, so none is wrong.
        steps = max(1, _BLOCK // max(1, stop - start))
        key = (epoch, k // steps, start, stop)
        block = self._last
        if block is None or block.key != key:
            block = self._last = _Block(key, self._permuted(epoch, k // steps * steps, steps, start, stop))
        return block.indices[k % steps].copy()  # a source may return it as data, which is then written to

    def _permuted(self, epoch: int, first: int, steps: int, start: int, stop: int) -> np.ndarray:
        batches = np.arange(first, min(first + steps, self.steps_per_epoch), dtype=np.int64)
        positions = batches[:, None] * self.batch_size + np.arange(start, stop, dtype=np.int64)
        # The block may reach past the end of a short last batch, whose own rows are asked for under
        # another key: clipping those positions only keeps the permutation in its domain.
        inside = np.minimum(positions, self.records - 1).ravel()
        return permute(inside, self.records, epoch_keys(self.seed, epoch)).reshape(positions.shape)
