from __future__ import annotations

import math

import numpy as np
import pytest

from penstock_bench.repetition import LEAST_TURNS, MOST_TURNS, Repetition, Variances, repetition, that_fit, variances


def rounds(rng, count: int, turns: int, between: float, within: float) -> list[np.ndarray]:
    return [rng.normal(0, between) + rng.normal(0, within, turns) for _ in range(count)]


def test_the_variances_of_both_levels_are_found():
    found = variances(rounds(np.random.default_rng(0), 400, 10, 0.02, 0.05))
    assert math.sqrt(found.within) == pytest.approx(0.05, rel=0.05)
    assert math.sqrt(found.between) == pytest.approx(0.02, rel=0.1)


def test_rounds_that_differ_only_by_their_turns_have_no_variance_of_their_own():
    found = [variances(rounds(np.random.default_rng(seed), 10, 10, 0.0, 0.05)) for seed in range(50)]
    assert np.median([one.between for one in found]) < 0.005**2


def test_rounds_of_one_turn_scatter_by_both_levels():
    rng = np.random.default_rng(0)
    found = variances([rng.normal(0, 0.1, 1) for _ in range(200)])
    assert math.sqrt(found.within) == pytest.approx(0.1, rel=0.15)
    assert found.between is None
    assert variances([np.array([0.01]), np.array([0.0]), np.array([0.01])]).within == 0.0
    disturbed = variances([*(rng.normal(0, 0.02, 1) for _ in range(9)), np.array([3.0])])
    assert math.sqrt(disturbed.within) < 0.1


def test_rounds_of_one_turn_do_not_hide_how_much_the_turns_of_others_scatter():
    found = variances([np.array([-0.1, 0.1]), np.array([0.05]), np.array([0.02]), np.array([-0.03])])
    assert math.sqrt(found.within) == pytest.approx(0.1 * math.sqrt(2))


def test_one_turn_tells_nothing_and_two_rounds_nothing_about_rounds():
    assert variances([np.array([0.1])]) is None
    assert variances([np.array([0.1]), np.array([0.2])]) is None
    assert variances([np.array([0.1, 0.2]), np.array([0.0, 0.1])]).between is None


def test_more_turns_are_best_where_starts_are_dear_and_turns_scatter():
    def turns(starting, turning, within, between):
        return repetition([Variances(within**2, between**2, 1000)], starting, turning).turns

    assert turns(90.0, 1.0, 0.05, 0.015) == pytest.approx(math.sqrt(90) * 0.05 / 0.015, abs=1)
    assert turns(10.0, 1.0, 0.05, 0.015) < turns(90.0, 1.0, 0.05, 0.015) < turns(90.0, 1.0, 0.15, 0.015)
    assert turns(0.1, 60.0, 0.01, 0.05) == LEAST_TURNS
    assert turns(1e6, 0.1, 0.5, 0.001) == MOST_TURNS


@pytest.mark.parametrize("starting", [5.0, 60.0])
def test_the_number_of_turns_gives_the_smallest_error_in_the_same_time(starting):
    within, between, turning = 0.06**2, 0.015**2, 2.0
    best = repetition([Variances(within, between, 10_000)], starting, turning).turns

    def variance(turns):
        return (between + within / turns) * (starting + turns * turning)  # of the mean, times the time that is there

    assert variance(best) <= 1.01 * min(map(variance, range(1, 200)))


def test_before_there_are_rounds_a_usual_difference_between_processes_is_assumed():
    plan = repetition([Variances(0.05**2, None, 1)], 10.0, 1.0)
    assert plan.assumed
    assert plan.between == pytest.approx(0.015)
    assert repetition([], 10.0, 1.0) is None


def test_rounds_are_made_shorter_together_so_that_they_fit():
    wanted = [Repetition(20, 0.05, 0.01, False, 10.0, 1.0), Repetition(10, 0.05, 0.01, False, 10.0, 10.0)]
    assert that_fit(wanted, 5, math.inf) == [20, 10]
    some = that_fit(wanted, 5, 5 * (20 + 70))
    assert 5 * sum(one.starting + one.turning * turns for one, turns in zip(wanted, some, strict=True)) <= 450
    assert all(LEAST_TURNS < turns < one.turns and turns % 2 == 0 for one, turns in zip(wanted, some, strict=True))
    assert that_fit(wanted, 5, 1.0) == [LEAST_TURNS, LEAST_TURNS]
