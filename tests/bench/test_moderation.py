"""Comparisons that borrow strength from each other: they find more, and are not wrong more often."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.bench.levels import compare_rounds
from penstock.bench.live_pairs import RoundPairs
from penstock.bench.moderation import FEWEST, moderate
from penstock.bench.statistics import Comparison, compare, holm


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
    assert moderate(few) == few
    many = [*report(rng, 5, [0.02] * FEWEST), compare([1.0, 1.1] * 5, [1.0] * 10), Comparison(0, None)]
    assert moderate(many)[FEWEST:] == many[FEWEST:]
    assert moderate(many)[0] != many[0]


def test_comparisons_that_scatter_alike_are_found_to_and_gain_much():
    rng = np.random.default_rng(1)
    before = report(rng, 4, [0.02] * 40)
    after = moderate(before)
    assert all(one.freedom > 30 for one in after)
    errors = [one.error for one in after]
    assert max(errors) / min(errors) < 1.3
    level = 0.05 / 40
    gain = np.median([one.detectable(level, True) - 1 for one in before]) / np.median(
        [one.detectable(level, True) - 1 for one in after]
    )
    assert gain > 2


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rounds", [4, 6])
def test_intervals_hold_the_truth_and_no_report_is_wrong_too_often_however_much_the_scales_differ(spread, rounds):
    rng = np.random.default_rng(2)
    reports, count, held, wrong = 300, 24, 0, 0
    for _ in range(reports):
        made = moderate(report(rng, rounds, 0.02 * np.exp(rng.normal(0, spread, count))))
        held += sum(one.low <= 1 <= one.high for one in made)
        wrong += min(holm([one.p for one in made])) < 0.05
    assert held / (reports * count) >= 0.93
    assert wrong <= 0.05 * reports + 3 * math.sqrt(reports * 0.05 * 0.95)
