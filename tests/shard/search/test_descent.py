"""The best use of one mesh axis, given how the others are used."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.shard.search.exhaustive import Exhaustive
from tests.shard.search.programs import ONE_AXIS, anything, problems, random_problem

from penstock.shard.search.descent import Descent
from penstock.shard.search.layout_tables import LayoutTables

STORAGE = 1e-3
"""All that is stored costs this part of the computing."""
COLUMNS = ("value", "node", "bytes", "start", "end", "edge", "form")
"""The entries of a live range."""


def minimised(costs, assignment):
    """Return the cost that `improve` minimises: each collective is counted, also where an array goes into one layout twice."""
    sent = 0.0
    for bundles, times in costs.arrays.items():
        for edge in [costs.folded.bundles[bundle].edge for bundle in dict.fromkeys(bundles)]:
            sent += times * costs.edge_seconds(edge, costs.reshard_steps(edge, assignment))
    _, stored = costs.local_bytes(assignment)
    total = sum(size for _, size in costs.stored)
    kept = STORAGE * costs.compute_seconds(costs.start()) * stored / total if total else 0.0
    return costs.compute_seconds(assignment) + sent + kept


@settings(max_examples=25)
@given(problems())
def test_the_best_use_of_an_axis_never_raises_the_cost(given_problem):
    costs, rng = given_problem
    tables = LayoutTables(costs)
    assignment = anything(costs, rng)
    for axis in range(len(costs.links.sizes)):
        improved = tables.assignment(Descent(tables).improve(tables.states(assignment), axis))
        assert minimised(costs, improved) <= minimised(costs, assignment) * (1 + 1e-9)
        bit = 1 << axis
        for before, after, number in zip(assignment, improved, costs.folded.of_node, strict=True):
            assert [mask & ~bit for mask in before] == [mask & ~bit for mask in after]
            assert after == improved[costs.folded.first[number]]
        assignment = improved


@settings(max_examples=20)
@given(st.integers(0, 2**16), st.booleans())
def test_on_one_axis_its_best_use_is_the_best_of_all(seed, only_copies):
    costs = random_problem(seed, ONE_AXIS)
    if only_copies:  # as in a step whose results all replace its state
        live = costs.live_ranges
        costs = replace(costs, live_ranges=replace(live, **{each: getattr(live, each)[live.edge >= 0] for each in COLUMNS}))
    every, tables = Exhaustive(costs), LayoutTables(costs)
    best = min(minimised(costs, every.assignment(state)) for states in every.enumerate(10_000) for state in states)
    improved = tables.assignment(Descent(tables).improve(tables.states(costs.start()), 0))
    assert minimised(costs, improved) == pytest.approx(best, rel=1e-9)
