"""Best-fit decreasing: pieces of different sizes go into as few bins of one size as this heuristic finds.

Sizes and the size of a bin go in; the bin of each piece comes out. Each piece, from the largest to the smallest, goes into the
bin with the least free space that still holds it (Johnson, 1973: at most 11/9 of the fewest possible bins, plus 4).

Bins with the same free space are interchangeable, and so are pieces of the same size. So one operation puts many pieces into many
bins: a window of n pieces takes about as many operations as it has different sizes. The classes of free space that have bins are
the bits of one integer, whose lowest set bit from `size` on is the best fit.
"""

from __future__ import annotations

import numpy as np


def best_fit_decreasing(sizes: np.ndarray, bin_size: int) -> np.ndarray:
    """Choose a bin for each piece.

    Args:
      sizes: integers [n], each in `1 … bin_size`.
      bin_size: what a bin holds.

    Returns:
      int64 [n], the number of the bin of each piece. Bins are numbered from 0, and each has at least one piece.

    Example:
      >>> best_fit_decreasing(np.array([2, 5, 3, 6]), 8).tolist()  # 6 + 2 and 5 + 3
      [0, 1, 1, 0]
    """
    order = np.argsort(-sizes, kind="stable")
    distinct, counts = np.unique(sizes, return_counts=True)
    chosen: list[int] = []  # the bins of the pieces in `order`
    bins_with: dict[int, list[int]] = {}  # by free space
    free = 0  # bit r is set if `bins_with[r]` has bins
    bins = 0
    for size, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            fitting = free >> size
            if fitting:
                space = size + (fitting & -fitting).bit_length() - 1
                candidates = bins_with.pop(space)
                free ^= 1 << space
            else:
                space = bin_size
                needed = -(-count // (bin_size // size))
                candidates = list(range(bins, bins + needed))
                bins += needed
            each = space // size
            full, rest = divmod(count, each)  # `full` bins take `each` pieces, and one bin takes the rest
            taken = [candidates] if full >= len(candidates) else [candidates[:full], candidates[full : full + 1]]
            for some, pieces in zip(taken, (each, rest), strict=False):
                chosen += sorted(some * pieces)  # neighbours in `order` share a bin
                count -= len(some) * pieces
                free |= _put(bins_with, space - size * pieces, some)
            if len(taken) == 2:
                free |= _put(bins_with, space, candidates[full + 1 :])
    bin_of = np.empty(len(sizes), np.int64)
    bin_of[order] = chosen
    return bin_of


def _put(bins_with: dict[int, list[int]], space: int, bins: list[int]) -> int:
    """Add bins to the class with this free space, and return the bit to set. Full bins are dropped."""
    if not bins or space == 0:
        return 0
    bins_with.setdefault(space, []).extend(bins)
    return 1 << space
