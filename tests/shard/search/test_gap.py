"""The plan that is found beside the best of all, on problems small enough to know it; the figures are those of docs/search.md."""

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.shard.search.exhaustive import Exhaustive, TooLarge
from tests.shard.search.gap import case_of, gap, limits_of, random_case, search
from tests.shard.search.programs import FAST_LINKS, HARDWARE, MESHES, ONE_AXIS, model_of, random_problem, random_step, steps

from penstock.shard.search.costs import build_costs
from penstock.shard.search.problem import Problem
from penstock.shard.search.solver import solve

FREE = float("inf")
BEST = 1.001
NEAR = 1.08 * 1.02  # a baseline is taken if it is 8 % slower, and times within 2 % are near-ties
MOST = 10_000
meshes = pytest.mark.parametrize(
    "mesh",
    [pytest.param(mesh, marks=[pytest.mark.slow] * (len(mesh) > 2)) for mesh in MESHES],
    ids=lambda mesh: "x".join(map(str, mesh.values())),
)
seeds = st.integers(0, 2**16)


def program_case(seed, mesh, operations=3):
    return case_of(model_of(random_step(seed, operations)), mesh, HARDWARE[seed % len(HARDWARE)])


def cases(mesh):
    """A fixed set: random programs and random graphs."""
    return [program_case(seed, mesh) for seed in range(8)] + [random_case(seed, mesh) for seed in range(8)]


def gaps(mesh, limited):
    found = []
    for case in cases(mesh):
        try:
            every = Exhaustive(case.costs)
        except TooLarge:
            continue
        for limit in limits_of(case, every) if limited else [FREE]:
            each = gap(case, every, limit, MOST)
            if each.exact:
                found.append(each.seconds)
    return found


@settings(max_examples=8)
@given(seeds, st.sampled_from([ONE_AXIS, *MESHES]))
def test_the_best_of_all_is_the_least_of_every_assignment(seed, mesh):
    every = Exhaustive(random_problem(seed, mesh, 3))
    if every.count <= 20_000:
        seconds = np.concatenate([every.costs(states).seconds for states in every.enumerate(20_000)])
        assert every.cheapest().least == pytest.approx(seconds.min(), rel=1e-9)


@settings(max_examples=8)
@given(seeds, st.sampled_from(MESHES), st.floats(0.05, 1))
def test_the_best_within_a_limit_is_the_least_of_every_assignment_within_it(seed, mesh, part):
    case = random_case(seed, mesh, 3)
    every = Exhaustive(case.costs)
    if every.count > 20_000:
        return
    costs = [every.costs(states) for states in every.enumerate(20_000)]
    seconds, memory = (np.concatenate([getattr(each, name) for each in costs]) for name in ("seconds", "memory"))
    limit = float(memory.min() + part * (memory.max() - memory.min())) * (1 + 1e-9)
    _, seen = search(case, limit)
    known = np.stack([every.state(each) for each in [*seen, every.assignment(_smallest(every))]])
    assert every.fastest(limit, known, 20_000) == pytest.approx(seconds[memory <= limit].min(), rel=1e-9)


def _smallest(every):
    states = np.concatenate(list(every.enumerate(20_000)))
    return states[every.costs(states).memory.argmin()]


@settings(max_examples=8)
@given(seeds, st.sampled_from(MESHES))
def test_costs_of_many_assignments_are_those_of_the_problem(seed, mesh):
    model, rng = program_case(seed, mesh, 2).costs, np.random.default_rng(seed)
    try:
        every = Exhaustive(model)
    except TooLarge:
        return
    states = np.stack([rng.integers(0, count, 4) for count in every.states], axis=1)
    costs = every.costs(states)
    for row, state in enumerate(states):
        assignment = every.assignment(state)
        assert costs.seconds[row] == pytest.approx(model.seconds(assignment), rel=1e-9)
        assert costs.memory[row] == pytest.approx(model.memory(assignment)[0], rel=1e-9)
        np.testing.assert_array_equal(every.state(assignment), state)


def test_on_one_axis_the_fastest_plan_is_found():
    for case in [*cases(ONE_AXIS), *(case_of(model_of(step), ONE_AXIS, FAST_LINKS) for step in steps(ONE_AXIS).values())]:
        _, seen = search(case, FREE)
        assert min(map(case.costs.seconds, seen)) <= BEST * Exhaustive(case.costs).cheapest().least


@meshes
def test_on_several_axes_the_fastest_plan_is_found_nearly_always(mesh):
    found = gaps(mesh, limited=False)
    assert len(found) >= 12
    assert np.mean(np.array(found) <= BEST) >= 0.95
    assert max(found) <= 1.05


@meshes
def test_within_a_memory_limit_the_fastest_plan_is_found_mostly(mesh):
    found = gaps(mesh, limited=True)
    assert len(found) >= 12
    assert np.mean(np.array(found) <= BEST) >= 0.7
    assert np.quantile(found, 0.9) <= 1.2
    assert max(found) <= 1.5


@meshes
def test_the_fastest_plan_of_small_steps_is_found(mesh):
    compared = 0
    for name in ("one_layer", "forward", "embedding", "residual", "elementwise"):
        case = case_of(model_of(steps(mesh)[name]), mesh, FAST_LINKS)
        with contextlib.suppress(TooLarge):  # on three axes, one of them
            best = Exhaustive(case.costs).cheapest().least
            _, seen = search(case, FREE)
            assert min(map(case.costs.seconds, seen)) <= 1.15 * best, name
            compared += 1
    assert compared >= 4


@settings(max_examples=10)
@given(seeds, st.sampled_from(MESHES), st.floats(0.1, 1.2))
def test_no_baseline_within_the_limit_is_faster(seed, mesh, part):
    case = program_case(seed, mesh)
    limit = part * case.costs.memory(case.costs.start())[0]
    found = solve(Problem(case.costs), limit, case.baselines)
    for each in case.baselines:
        if case.costs.memory(each)[0] <= limit:
            assert found.memory <= limit
            assert found.seconds <= NEAR * case.costs.seconds(each)


@meshes
def test_no_plan_that_takes_one_axis_at_a_time_is_faster(mesh):
    for seed in range(8):
        case = program_case(seed, mesh)
        _, seen = search(case, FREE)
        fastest, costs = min(map(case.costs.seconds, seen)), case.costs
        free = np.zeros(costs.live_ranges.steps)
        for start, order in itertools.product([costs.start(), *case.baselines], itertools.permutations(range(len(mesh)))):
            assignment = start
            for axis in order:
                assignment = Problem(costs).improve(assignment, axis, free)
            assert fastest <= BEST * costs.seconds(assignment)


@settings(max_examples=6)
@given(seeds, st.sampled_from(MESHES), st.floats(0.1, 1.2))
def test_the_same_plan_is_found_every_time(seed, mesh, part):
    model = model_of(random_step(seed, 3))
    one, other = (case_of(model, mesh, FAST_LINKS) for _ in range(2))
    limit = part * one.costs.memory(one.costs.start())[0]
    assert solve(Problem(one.costs), limit, one.baselines) == solve(Problem(other.costs), limit, other.baselines)


@settings(max_examples=8)
@given(seeds, st.sampled_from(MESHES))
def test_what_is_returned_is_the_cost_of_the_plan(seed, mesh):
    costs = build_costs(model_of(random_step(seed, 3)), mesh, FAST_LINKS)
    found = solve(Problem(costs), FREE, [])
    assert found.seconds == pytest.approx(costs.seconds(found.assignment), rel=1e-12)
    assert (found.memory, found.peak_op) == costs.memory(found.assignment)
