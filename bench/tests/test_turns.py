from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock_bench.turns import orders, williams


@given(st.integers(2, 9))
def test_each_variant_has_each_place_and_follows_each_other_one_equally_often(count):
    rows = williams(count)
    assert all(sorted(row) == list(range(count)) for row in rows)
    for column in zip(*rows, strict=True):
        assert set(Counter(column).values()) == {len(rows) // count}
    followers = Counter(pair for row in rows for pair in pairwise(row))
    assert len(followers) == count * (count - 1)
    assert len(set(followers.values())) == 1


@given(st.integers(2, 7), st.text(max_size=5))
def test_each_turn_is_followed_by_its_reverse(count, seed):
    names = [f"v{number}" for number in range(count)]
    turns = list(islice(orders(names, seed), 4 * count))
    for turn, back in zip(turns[::2], turns[1::2], strict=True):
        assert back == turn[::-1]
    assert all(sorted(turn) == names for turn in turns)


@given(st.integers(2, 7), st.text(max_size=5))
def test_backwards_the_reverse_comes_first(count, seed):
    """So two rounds of one turn each balance a drift, as two turns do."""
    names = [f"v{number}" for number in range(count)]
    turns, backwards = (list(islice(orders(names, seed, way), 4 * count)) for way in (False, True))
    assert backwards[::2] == turns[1::2]
    assert backwards[1::2] == turns[::2]


def test_the_order_depends_only_on_the_seed():
    assert list(islice(orders("abcd", "1"), 8)) == list(islice(orders("abcd", "1"), 8))
    assert len({tuple(next(orders("abcd", str(seed)))) for seed in range(30)}) > 5
