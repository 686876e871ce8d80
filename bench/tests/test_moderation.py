"""Comparisons that borrow strength from each other: they find more, and are not wrong more often."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock_bench.levels import compare_rounds
from penstock_bench.live_pairs import RoundPairs
from penstock_bench.moderation import FEWEST, moderate
from penstock_bench.statistics import Comparison, compare, holm


def report(rng, rounds: int, scales, truth: float = 0.0) -> list[Comparison]:
    """One report: a comparison for each scale, the standard deviation of its rounds."""
    nothing = np.full(1, math.nan)
    return [
        compare_rounds([RoundPairs(n, np.array([truth + rng.normal(0, scale)]), nothing, np.zeros(1)) for n in range(rounds)])
        for scale in scales
    ]


def test_few_comparisons_and_those_of_the_other_design_stay_as_they_are():
    rng = np.random.default_rng(0)
    few = report(rng, 5, [0.02] * (FEWEST - 1))
    assert moderate(few, range(len(few))) == few
    many = [*report(rng, 5, [0.02] * FEWEST), compare([1.0, 1.1] * 5, [1.0] * 10), Comparison(0, None)]
    after = moderate(many, range(len(many)))
    assert after[FEWEST:] == many[FEWEST:]
    assert after[0] != many[0]


def test_comparisons_that_scatter_alike_are_found_to_and_gain_much():
    rng = np.random.default_rng(1)
    before = report(rng, 4, [0.02] * 40)
    after = moderate(before, range(40))
    assert all(one.freedom > 30 for one in after)
    errors = [one.error for one in after]
    assert max(errors) / min(errors) < 1.3
    level = 0.05 / 40
    gain = np.median([one.detectable(level, True) - 1 for one in before]) / np.median(
        [one.detectable(level, True) - 1 for one in after]
    )
    assert gain > 2


@pytest.mark.parametrize(("spread", "rounds"), [(0.0, 4), (1.0, 6)])
def test_intervals_hold_the_truth_and_no_report_is_wrong_too_often_however_much_the_scales_differ(spread, rounds):
    rng = np.random.default_rng(2)
    reports, count, held, wrong = 100, 24, 0, 0
    for _ in range(reports):
        made = moderate(report(rng, rounds, 0.02 * np.exp(rng.normal(0, spread, count))), range(count))
        held += sum(one.low <= 1 <= one.high for one in made)
        wrong += min(holm([one.p for one in made])) < 0.05
    assert held / (reports * count) >= 0.93
    assert wrong <= 0.05 * reports + 3 * math.sqrt(reports * 0.05 * 0.95)


@pytest.mark.parametrize(("of_baseline", "workloads"), [(0.02, 4), (0.06, 1)])
def test_comparisons_that_share_a_baseline_do_not_count_as_independent(of_baseline, workloads):
    rng = np.random.default_rng(3)
    reports, held, wrong, rounds, variants = 100, [], 0, 4, 8
    nothing = np.full(1, math.nan)
    for _ in range(reports):
        made = []
        for _ in range(workloads):
            baseline = rng.normal(0, of_baseline, rounds)
            for _ in range(variants):
                logs = rng.normal(0, 0.02, rounds) - baseline
                made.append(compare_rounds([RoundPairs(n, logs[n : n + 1], nothing, np.zeros(1)) for n in range(rounds)]))
        made = moderate(made, [place // variants for place in range(len(made))])
        held += [one.low <= 1 <= one.high for one in made]
        wrong += min(holm([one.p for one in made])) < 0.05
    assert np.mean(held) >= 0.92
    assert wrong <= 0.05 * reports + 2 * math.sqrt(reports * 0.05 * 0.95)
