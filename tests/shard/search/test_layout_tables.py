"""The tables of all layouts are the costs of each assignment."""

import pytest
from hypothesis import given, settings
from tests.shard.search.exhaustive import all_layouts
from tests.shard.search.programs import anything, problems

from penstock.shard.search.layout_tables import LayoutTables, find_layouts


def seconds(tables, states):
    """Sum the tables at the states: a shared reshard counts once for each layout."""
    total = sum(costs[state] for costs, state in zip(tables.seconds, states, strict=True))
    total += sum(pair.seconds[pair.rows[states[pair.a]], pair.columns[states[pair.b]]] for pair in tables.pairs)
    for shared in tables.shared:
        slowest = {}
        for reader in shared.readers:
            pair = tables.pairs[reader.pair]
            at = pair.rows[states[pair.a]], pair.columns[states[pair.b]]
            slowest[reader.target[at]] = max(slowest.get(reader.target[at], 0.0), reader.seconds[at])
        total += shared.times * sum(slowest.values())
    return total


def live(tables, states, time):
    """Sum what is live at an operation."""
    moment = tables.moment(time)
    total = sum(size / shards[state] for size, shards, state in zip(moment.classes, tables.shards, states, strict=True))
    for (bundle, form), size in moment.copies.items():
        pair = tables.pairs[tables.pair_of[bundle]]
        copied = pair.reshards[bundle].copied(form)
        total += size * copied[pair.rows[states[pair.a]], pair.columns[states[pair.b]]]
    return total


@settings(max_examples=25)
@given(problems())
def test_the_tables_sum_up_to_the_costs_of_an_assignment(given_problem):
    costs, rng = given_problem
    tables, assignment = LayoutTables(costs), anything(costs, rng)
    states = tables.states(assignment)
    assert tables.assignment(states) == assignment
    assert seconds(tables, states) == pytest.approx(costs.seconds(assignment), rel=1e-9)
    assert sum(each[state] for each, state in zip(tables.stored, states, strict=True)) == pytest.approx(
        sum(costs.stored_bytes(node, size, assignment[node]) for node, size in costs.stored)
    )
    memory, peak = costs.memory(assignment)
    stored = costs.local_bytes(assignment)[1]
    assert live(tables, states, peak) + stored == pytest.approx(memory, rel=1e-9)


@settings(max_examples=25)
@given(problems())
def test_a_node_has_all_layouts_that_divide_it(given_problem):
    costs, _ = given_problem
    for node in costs.graph.nodes:
        assert set(find_layouts(node, costs.links)) == set(all_layouts(node, costs.links))
