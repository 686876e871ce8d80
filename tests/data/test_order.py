import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from penstock.data.order import Order, epoch_keys, permute


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


@pytest.mark.parametrize("records", [2, 3, 4, 5])
def test_all_orders_of_few_records_are_equally_likely(records):
    orders = Counter(tuple(permute(np.arange(records), records, epoch_keys(seed, 0))) for seed in range(6000))
    counts = list(orders.values()) + [0] * (math.factorial(records) - len(orders))
    assert chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("records", [5000, 60_000, 2**24, 2**24 + 1])
def test_any_two_positions_are_equally_likely_to_hold_any_two_records(records):
    positions = np.array([0, 1, records // 2, records - 1])
    orders = np.array([permute(positions, records, epoch_keys(seed, 0)) for seed in range(6000)])
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


@given(
    records=st.integers(1, 500),
    batch_size=st.integers(1, 64),
    remainder=st.sampled_from(["drop", "pad", "keep"]),
    shuffle=st.booleans(),
)
def test_each_epoch_visits_each_record_once_but_for_what_is_dropped(records, batch_size, remainder, shuffle):
    order = Order(records, batch_size, shuffle, 5, remainder)
    steps = order.steps_per_epoch
    for epoch in (0, 1, 10**9):
        batches = [order.indices(k, 0, order.rows(k)) for k in range(epoch * steps, (epoch + 1) * steps)]
        seen = np.concatenate(batches) if batches else np.empty(0, np.int64)
        assert len(set(seen.tolist())) == len(seen)
        assert len(seen) == (records - records % batch_size if remainder == "drop" else records)


def test_epochs_differ():
    order = Order(1000, 100, True, 0, "drop")
    assert order.indices(0, 0, 100).tolist() != order.indices(10, 0, 100).tolist()


def test_slices_of_processes_make_up_the_global_batch():
    order = Order(10_000, 64, True, 0, "drop")
    whole = order.indices(77, 0, 64)
    assert np.concatenate([order.indices(77, p * 16, p * 16 + 16) for p in range(4)]).tolist() == whole.tolist()


def test_memory_does_not_grow_with_the_number_of_records():
    import tracemalloc

    tracemalloc.start()
    order = Order(10**10, 256, True, 0, "drop")
    for step in (0, 10**6, 10**9):
        order.indices(step, 0, 256)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4e6


def test_indices_are_the_callers_own():
    order = Order(100, 10, True, 0, "drop")
    before = order.indices(3, 0, 10).tolist()
    order.indices(3, 0, 10)[:] = 0
    assert order.indices(3, 0, 10).tolist() == before
