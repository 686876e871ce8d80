"""Costs of assignments: seconds and memory."""

import math

import pytest
from hypothesis import given, settings
from tests.shard.search.exhaustive import all_layouts
from tests.shard.search.programs import MESHES, anything, problems

from penstock.shard.mesh.resharding import union


@settings(max_examples=25)
@given(problems())
def test_seconds_are_those_of_computing_and_of_collectives(given_problem):
    costs, rng = given_problem
    assignment = anything(costs, rng)
    computing = sum(costs.node_seconds(node, layout) for node, layout in enumerate(assignment))
    seen, sending = set(), 0.0
    for index, edge in enumerate(costs.graph.edges):
        steps = costs.reshard_steps(edge, assignment)
        layout = tuple(0 if dim is None else assignment[edge.b][dim] for dim in edge.target)
        reader = edge.b if edge.kind in ("operand", "shared_reshard") else None
        key = (edge.value, edge.count, edge.kind == "result", reader, layout)
        if edge.summed_as is not None:
            is_sum = [step.kind in ("all-reduce", "reduce-scatter") for step in steps] == [True]
            key = (edge.summed_as, edge.count, layout, *((steps[0].kind, steps[0].axes) if is_sum else (index,)))
        if steps and key not in seen:
            seen.add(key)
            sending += edge.count * sum(step.bytes_on_wire / costs.links.speed(step.kind, step.axes)[0] for step in steps)
            together = edge.together and edge.count == 1  # the CPU compiler combines all of them into one
            for step in steps:
                shared = (math.inf if together else edge.combined) if step.kind == "all-reduce" else 1
                sending += edge.count * costs.links.speed(step.kind, step.axes)[1] / shared
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
