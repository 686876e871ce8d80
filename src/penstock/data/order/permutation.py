"""Permute record indices by a keyed permutation that is computed, and never stored.

The permutation of `0 … records-1` is evaluated only at the positions that a batch needs. So its memory does not depend on the
number of records, and step 10^9 costs as much as step 0. It is a Feistel network (Luby & Rackoff, 1988), which is a bijection for
any round function. It permutes a rectangle of `rows × 2^k` cells that is just large enough for the records. A position that lands
on a cell beyond the last record is put through the network again until it does not ("cycle walking": Black & Rogaway, 2002). The
result is still a bijection.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

# With twelve rounds, all orders of tiny data sets (n <= 6) are equally likely by a chi-square test. With fewer rounds they are
# not, because each half of a position has only two or three values. Six rounds suffice where the halves are larger.
_ROUNDS, _FEW_ROUNDS, _FEW_ROUNDS_FROM = 12, 6, 4096

# Up to this number of records, words of 32 bits are used, which take a third of the time. Their hash has 16 bits, which are
# scaled to at most 2^12 rows. So some rows are hit by 17 hash values and others by 16, and six rounds even this out.
_NARROW = 1 << 24

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the increment of splitmix64

# By bytes of a word. 4: the finaliser of MurmurHash3 (Appleby, 2011). 8: constants of splitmix64 (Vigna, 2015) and PCG (O'Neill,
# 2014).
_MULTIPLIERS = {
    4: (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)),
    8: (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)),
}


def epoch_keys(seed: int, epoch: int) -> np.ndarray:
    """Derive the round keys, uint64 [12], of the permutation of one epoch."""
    return np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)


def many_keys(seed: int, stream: int, numbers: np.ndarray) -> np.ndarray:
    """Derive the round keys of many permutations, uint64 [12, *numbers.shape]: one permutation for each number >= 0.

    The keys are a hash of (seed, stream, number): the generator splitmix64 (Steele, Lea & Flood, 2014), once for each number.
    """
    state = _splitmix(_start(seed, stream) + numbers.reshape(-1).astype(np.uint64) * _GOLDEN)
    steps = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _GOLDEN
    return _splitmix(np.add.outer(steps, state)).reshape(_ROUNDS, *numbers.shape)


@functools.lru_cache(maxsize=1024)
def _start(seed: int, stream: int) -> np.ndarray:
    return np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)


def _splitmix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permute(positions: np.ndarray, records: int, keys: np.ndarray) -> np.ndarray:
    """Map positions to record indices by the permutation that `keys` select.

    Args:
      positions: integers of any shape in `[0, records)`.
      records: at most 2^62.
      keys: uint64 [12] from `epoch_keys`; or from `many_keys`, [12, ...] where the rest broadcasts to `positions`: each
        position then has a permutation of its own.

    Returns:
      int64, as `positions`; distinct positions give distinct indices in `[0, records)` by the same keys.

    Examples:
      >>> sorted(permute(np.arange(5), 5, epoch_keys(seed=0, epoch=0)).tolist())
      [0, 1, 2, 3, 4]
    """
    rows, k, word, rounds = _network(records, keys)
    x = _feistel(positions.astype(word), rows, k, rounds)
    flat = x.reshape(-1)  # a view, as `x` is new and contiguous
    outside = np.flatnonzero(flat >= records)
    if outside.size and rounds.ndim > 1:
        rounds = np.broadcast_to(rounds, (len(rounds), *x.shape)).reshape(len(rounds), -1)
    while outside.size:
        flat[outside] = _feistel(flat[outside], rows, k, rounds if rounds.ndim == 1 else rounds[:, outside])
        outside = outside[flat[outside] >= records]
    return x.astype(np.int64)


def permute_all(records: int, keys: np.ndarray) -> np.ndarray:
    """Return n complete permutations of a range, int64 [n, records], by keys uint64 [12, n] from `many_keys`.

    Each row is what `permute` returns for the positions 0 … records - 1. This takes less time, as each cell is computed once.
    """
    rows, k, word, rounds = _network(records, keys)
    cells = _feistel(np.tile(np.arange(rows << k, dtype=word), (keys.shape[1], 1)), rows, k, rounds[:, :, None])
    x = cells[:, :records].astype(np.int64)
    which, outside = np.nonzero(x >= records)
    while outside.size:
        found = cells[which, x[which, outside]]
        x[which, outside] = found
        which, outside = which[found >= records], outside[found >= records]
    return x


def _network(records: int, keys: np.ndarray) -> tuple[int, int, Any, np.ndarray]:
    """Return the network of a range: rows of its rectangle, the exponent k of its columns, its word, a key for each round."""
    # 2^k is about the square root of `records`, so at most one in 2^k positions has to walk.
    k = (records - 1).bit_length() // 2
    word = np.uint32 if records <= _NARROW else np.uint64
    return -(-records >> k), k, word, (keys if records < _FEW_ROUNDS_FROM else keys[:_FEW_ROUNDS]).astype(word)


def _feistel(x: np.ndarray, rows: int, k: int, keys: np.ndarray) -> np.ndarray:
    """Apply a bijection on `[0, rows · 2^k)`: in turn, change the row by a hash of the column and the column by one of the row.

    `rows` and `2^k` are at most `2^(w/2)` for words of w bits.
    """
    word: Any = x.dtype.type
    shift, columns, height, half = word(k), word((1 << k) - 1), word(rows), word(x.itemsize * 4)
    row, column = x >> shift, x & columns
    change, scratch = np.empty_like(x), np.empty_like(x)  # new arrays in each round would take as long as the arithmetic
    for r, key in enumerate(keys):
        if r % 2 == 0:
            # A hash of w/2 bits scaled to [0, rows) (Lemire, 2019).
            np.add(column, key, out=change)
            _hash(change, half, scratch)
            change *= height
            change >>= half
            row += change
            np.subtract(row, height, out=scratch)
            np.minimum(row, scratch, out=row)  # modulo `rows`: a negative difference wraps around to a large number
        else:
            np.add(row, key, out=change)
            _hash(change, half, scratch)
            change &= columns
            column ^= change
    row <<= shift
    row |= column
    return row


def _hash(z: np.ndarray, half: np.unsignedinteger, scratch: np.ndarray) -> None:
    """Hash each word of w bits to w/2 bits, in place, by one multiply-xorshift round. `scratch` is memory of the same size."""
    first, second = _MULTIPLIERS[z.itemsize]
    z *= first
    np.right_shift(z, half, out=scratch)
    z ^= scratch
    z *= second
    z >>= half
