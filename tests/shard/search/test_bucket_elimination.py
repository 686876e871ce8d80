"""Elimination finds what trying everything finds."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shard.search.bucket_elimination import bucket_eliminate, find_kept


@st.composite
def networks(draw):
    """Decisions of one to four states, some pairs of which depend on each other, and a state of each."""
    states = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    every = list(itertools.combinations(range(len(states)), 2))
    linked = draw(st.lists(st.sampled_from(every), unique=True)) if every else []
    unary = [rng.integers(-9, 9, n).astype(float) for n in states]
    pairs = {(a, b): rng.integers(-9, 9, (states[a], states[b])).astype(float) for a, b in linked}
    return unary, pairs, [int(rng.integers(n)) for n in states]


def total(unary, pairs, chosen):
    alone = sum(costs[state] for costs, state in zip(unary, chosen, strict=True))
    return alone + sum(table[chosen[a], chosen[b]] for (a, b), table in pairs.items())


def least(unary, pairs):
    return min(total(unary, pairs, chosen) for chosen in itertools.product(*(range(len(costs)) for costs in unary)))


@settings(max_examples=50)
@given(networks())
def test_the_choice_is_as_cheap_as_the_best_of_all(network):
    unary, pairs, current = network
    chosen = bucket_eliminate(unary, pairs, current)
    assert total(unary, pairs, chosen) == least(unary, pairs)


@settings(max_examples=50)
@given(networks(), st.integers(1, 40))
def test_where_tables_may_not_grow_the_choice_is_no_worse_than_the_current_one(network, largest):
    unary, pairs, current = network
    chosen = bucket_eliminate(unary, pairs, current, largest)
    assert least(unary, pairs) <= total(unary, pairs, chosen) <= total(unary, pairs, current)


@settings(max_examples=50)
@given(networks())
def test_neither_the_costs_nor_the_current_states_are_written_to(network):
    unary, pairs, current = network
    before = [each.copy() for each in unary], {key: each.copy() for key, each in pairs.items()}, list(current)
    bucket_eliminate(unary, pairs, current)
    for one, other in zip(unary, before[0], strict=True):
        np.testing.assert_array_equal(one, other)
    for key, table in pairs.items():
        np.testing.assert_array_equal(table, before[1][key])
    assert current == before[2]


@settings(max_examples=50)
@given(networks(), st.integers(1, 40))
def test_the_choice_is_the_same_every_time(network, largest):
    assert bucket_eliminate(*network, largest) == bucket_eliminate(*network, largest)


def test_a_chain_of_a_thousand_decisions_is_decided_exactly():
    # Alternating is free and staying costs one; the first wants state 0.
    stay = np.eye(2)
    pairs = {(n, n + 1): stay for n in range(999)}
    unary = [np.array([0.0, 5.0]), *(np.zeros(2) for _ in range(999))]
    assert bucket_eliminate(unary, pairs, [1] * 1000) == [n % 2 for n in range(1000)]


def test_a_decision_of_more_states_than_a_table_may_have_is_still_made():
    assert bucket_eliminate([np.array([3.0, 1.0, 2.0])], {}, [0], largest=2) == [1]


@settings(max_examples=50)
@given(networks(), st.integers(1, 40))
def test_the_choice_depends_on_the_current_states_of_kept_variables_only(network, largest):
    unary, pairs, current = network
    kept = find_kept(list(map(len, unary)), list(pairs), largest)
    others = [state if variable in kept else (state + 1) % len(unary[variable]) for variable, state in enumerate(current)]
    chosen = bucket_eliminate(unary, pairs, current, largest)
    assert chosen == bucket_eliminate(unary, pairs, others, largest)
    assert [chosen[variable] for variable in kept] == [current[variable] for variable in kept]
