"""Costs of assignments, and the best use of one mesh axis."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.shard.search.exhaustive import Exhaustive, all_layouts
from tests.shard.search.programs import HARDWARE, MESHES, ONE_AXIS, array, model_of, random_problem, random_step

from penstock.shard.mesh.resharding import union
from penstock.shard.search.costs import build_costs
from penstock.shard.search.problem import Problem

STORAGE = 1e-3
"""All that is stored costs this part of the computing."""
COLUMNS = ("value", "node", "bytes", "start", "end", "edge", "form")
"""The entries of a live range."""


@st.composite
def problems(draw, meshes=(ONE_AXIS, *MESHES)):
    """Problems of random programs and of random graphs, and a generator for what else is random."""
    seed, mesh = draw(st.integers(0, 2**16)), draw(st.sampled_from(meshes))
    if draw(st.booleans()):
        return random_problem(seed, mesh), np.random.default_rng(seed)
    return build_costs(model_of(random_step(seed, 3)), mesh, HARDWARE[seed % 4]), np.random.default_rng(seed)


def anything(costs, rng):
    """Any assignment that gives nodes of a class the same layout."""
    classes = [all_layouts(costs.graph.nodes[first], costs.links) for first in costs.folded.first]
    chosen = [layouts[rng.integers(len(layouts))] for layouts in classes]
    return [chosen[number] for number in costs.folded.of_node]


def priced(costs, assignment, prices):
    """Return the cost that `improve` minimises: each collective is counted, also where an array goes into one layout twice."""
    sent = sum(edge.count * sum(costs.step_seconds(edge, costs.reshard_steps(edge, assignment))) for edge in costs.graph.edges)
    local, stored = costs.local_bytes(assignment)
    total = sum(size for _, size in costs.stored)
    kept = STORAGE * costs.compute_seconds(costs.start()) * stored / total if total else 0.0
    lived = sum(
        size * prices[start : end + 1].sum()
        for size, start, end in zip(local, costs.live_ranges.start, costs.live_ranges.end, strict=True)
    )
    return costs.compute_seconds(assignment) + sent + kept + lived + stored * prices.sum()


def without_stored_arrays(live_ranges):
    """Return the live ranges of copies that reshards make, without all others."""
    copies = live_ranges.edge >= 0
    return replace(live_ranges, **{each: getattr(live_ranges, each)[copies] for each in COLUMNS})


@settings(max_examples=25)
@given(problems())
def test_seconds_are_those_of_computing_and_of_collectives(given_problem):
    costs, rng = given_problem
    assignment = anything(costs, rng)
    computing = sum(costs.node_seconds(node, layout) for node, layout in enumerate(assignment))
    seen, sending = set(), 0.0
    for edge in costs.graph.edges:
        steps = costs.reshard_steps(edge, assignment)
        layout = tuple(0 if dim is None else assignment[edge.b][dim] for dim in edge.target)
        reader = edge.b if edge.kind in ("operand", "shared_reshard") else None
        key = (edge.value, edge.count, edge.kind == "result", reader, layout)
        if steps and key not in seen:
            seen.add(key)
            sending += edge.count * sum(step.bytes_on_wire / costs.links.speed(step)[0] for step in steps)
            together = edge.late and edge.count == 1  # the CPU compiler combines all of them into one
            begun = [step for step in steps if not (together and step.kind == "all-reduce")]
            sending += edge.count * sum(costs.links.speed(step)[1] for step in begun)
    assert costs.compute_seconds(assignment) == pytest.approx(computing, rel=1e-9)
    assert costs.seconds(assignment) == pytest.approx(computing + sending, rel=1e-9)


@settings(max_examples=25)
@given(problems())
def test_nothing_is_sent_where_nothing_is_sharded(given_problem):
    costs, _ = given_problem
    assert not list(costs.all_reshard_steps(costs.start()))
    assert costs.seconds(costs.start()) == costs.compute_seconds(costs.start())


@settings(max_examples=25)
@given(problems())
def test_memory_is_the_most_that_lives_at_one_time(given_problem):
    costs, rng = given_problem
    assignment = anything(costs, rng)
    local, stored = costs.local_bytes(assignment)
    live = costs.live_ranges
    at = [
        sum(size for size, start, end in zip(local, live.start, live.end, strict=True) if start <= time <= end)
        for time in range(live.steps)
    ]
    memory, peak = costs.memory(assignment)
    assert memory == pytest.approx(stored + max(at, default=0), rel=1e-9)
    assert at[peak] == pytest.approx(max(at), rel=1e-9)
    assert stored == pytest.approx(sum(size / costs.links.shards(union(assignment[node])) for node, size in costs.stored))


@settings(max_examples=25)
@given(problems(MESHES))
def test_one_more_axis_never_makes_computing_slower_nor_memory_larger(given_problem):
    costs, _ = given_problem
    for number, node in enumerate(costs.graph.nodes):
        for layout in all_layouts(node, costs.links):
            for dim, axis in ((dim, axis) for dim in range(len(layout)) for axis in range(len(costs.links.sizes))):
                if layout[dim] >> axis & 1:
                    without = tuple(mask & ~(1 << axis) for mask in layout)
                    assert costs.node_seconds(number, layout) <= costs.node_seconds(number, without)


@settings(max_examples=25)
@given(problems(), st.booleans())
def test_the_best_use_of_an_axis_never_raises_the_cost(given_problem, with_prices):
    costs, rng = given_problem
    assignment = anything(costs, rng)
    prices = rng.uniform(0, 1e-12, costs.live_ranges.steps) * with_prices
    for axis in range(len(costs.links.sizes)):
        improved = Problem(costs).improve(assignment, axis, prices)
        assert priced(costs, improved, prices) <= priced(costs, assignment, prices) * (1 + 1e-9)
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
        costs = replace(costs, live_ranges=without_stored_arrays(costs.live_ranges))
    every, free = Exhaustive(costs), np.zeros(costs.live_ranges.steps)
    best = min(priced(costs, every.assignment(state), free) for states in every.enumerate(10_000) for state in states)
    assert priced(costs, Problem(costs).improve(costs.start(), 0, free), free) == pytest.approx(best, rel=1e-9)


def test_a_layout_that_is_fixed_is_kept_in_every_assignment():
    model = model_of((lambda w, x: x @ w, (array(64, 64), array(64, 64))))
    costs = build_costs(model, MESHES[0], HARDWARE[0])
    constants = [number for number, node in enumerate(costs.graph.nodes) if node.fixed is not None]
    for axis in range(2):
        improved = Problem(costs).improve(costs.start(), axis, np.zeros(costs.live_ranges.steps))
        assert [improved[number] for number in constants] == [costs.start()[number] for number in constants]
