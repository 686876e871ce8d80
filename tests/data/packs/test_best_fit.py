"""Best-fit decreasing: no bin overflows, and it needs as many bins as the textbook's algorithm, piece by piece."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.packs.index import best_fit_decreasing


def piece_by_piece(sizes, bin_size):
    free = []
    for size in sorted(sizes, reverse=True):
        fitting = [space for space in free if space >= size]
        if fitting:
            free[free.index(min(fitting))] -= size
        else:
            free.append(bin_size - size)
    return sorted(free)


@given(st.integers(1, 70).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n), max_size=120))))
def test_bins_have_the_free_space_of_the_algorithm_piece_by_piece(case):
    bin_size, sizes = case
    bins = best_fit_decreasing(np.array(sizes, np.int64), bin_size)
    filled = np.bincount(bins, weights=sizes) if sizes else np.empty(0)
    assert sorted(bin_size - filled) == piece_by_piece(sizes, bin_size)


def test_many_pieces_of_one_size_share_bins():
    bins = best_fit_decreasing(np.full(1000, 3), 10)
    assert np.bincount(bins).tolist() == [3] * 333 + [1]
