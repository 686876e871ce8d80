import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from penstock.data.order.permutation import epoch_keys, many_keys, permute


@given(records=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 2**40))
def test_an_epoch_is_a_bijection(records, seed, epoch):
    order = permute(np.arange(records), records, epoch_keys(seed, epoch))
    assert np.array_equal(np.sort(order), np.arange(records))


@given(records=st.integers(2, 2**62), seed=st.integers(0, 2**32), data=st.data())
def test_distinct_positions_of_any_size_give_distinct_records_in_range(records, seed, data):
    positions = np.array(data.draw(st.lists(st.integers(0, records - 1), min_size=1, max_size=50, unique=True)))
    order = permute(positions, records, epoch_keys(seed, 0))
    assert len(set(order.tolist())) == len(positions)
    assert order.min() >= 0
    assert order.max() < records


def test_a_record_does_not_depend_on_what_else_is_asked_for():
    keys = epoch_keys(7, 3)
    whole = permute(np.arange(1000), 1000, keys)
    assert [permute(np.array([i]), 1000, keys)[0] for i in range(0, 1000, 37)] == whole[::37].tolist()


def test_order_is_the_same_on_every_machine():
    """A change of these numbers breaks every saved state."""
    assert permute(np.arange(6), 60_000, epoch_keys(42, 0)).tolist() == [10978, 52197, 57487, 13115, 52938, 50119]
    assert permute(np.arange(6), 10**10, epoch_keys(42, 0)).tolist() == [
        8381454778,
        2287233357,
        3426877748,
        3894259688,
        6042963291,
        6070188881,
    ]


@pytest.mark.parametrize("records", [3, 5])
def test_all_orders_of_few_records_are_equally_likely(records):
    orders = Counter(tuple(permute(np.arange(records), records, epoch_keys(seed, 0))) for seed in range(2500))
    counts = list(orders.values()) + [0] * (math.factorial(records) - len(orders))
    assert chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("records", [5000, 2**24 + 1])
def test_any_two_positions_are_equally_likely_to_hold_any_two_records(records):
    positions = np.array([0, 1, records // 2, records - 1])
    orders = np.array([permute(positions, records, epoch_keys(seed, 0)) for seed in range(2500)])
    coarse = orders * 8 // records  # the eighth of the records that each belongs to
    for i, j in [(0, 1), (0, 2), (2, 3)]:
        assert chisquare(np.bincount(coarse[:, i] * 8 + coarse[:, j], minlength=64)).pvalue > 1e-4
        assert chisquare(np.bincount((orders[:, i] ^ orders[:, j]) % 16, minlength=16)).pvalue > 1e-4


@pytest.mark.parametrize("records", [100_000, 2**24 + 1])
def test_neighbours_are_shuffled_apart(records):
    order = permute(np.arange(100_000), records, epoch_keys(0, 0))
    correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 0.02
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.02


@given(records=st.integers(1, 300), seed=st.integers(0, 2**40), first=st.integers(0, 2**40))
def test_many_permutations_at_once_are_bijections_of_their_own(records, seed, first):
    numbers = np.arange(first, first + 3)[:, None]
    orders = permute(np.tile(np.arange(records), (3, 1)), records, many_keys(seed, 1, numbers))
    assert (np.sort(orders) == np.arange(records)).all()
    for number, order in zip(numbers[:, 0], orders, strict=True):
        assert permute(np.arange(records), records, many_keys(seed, 1, number)).tolist() == order.tolist()
    if records > 20:
        assert len({tuple(order) for order in orders.tolist()}) == 3


def test_keys_are_the_same_on_every_machine():
    """A change of these numbers breaks every saved state of a mixture."""
    assert permute(np.arange(6), 60_000, many_keys(42, 1, np.array(10**9))).tolist() == [4449, 56995, 688, 50314, 28369, 30663]
