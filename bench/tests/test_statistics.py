from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from penstock_bench import statistics
from penstock_bench.statistics import FEWEST_PAIRS, compare, holm, typical

_POSITIVE = st.floats(1e-6, 1e6)


def _noisy(pairs: int, ratio: float = 1.0, seed: int = 0) -> tuple[list[float], list[float]]:
    rng = np.random.default_rng(seed)
    return list(ratio * np.exp(rng.normal(0, 0.01, pairs))), list(np.exp(rng.normal(0, 0.01, pairs)))


def test_typical_step_is_the_median_without_the_first_and_last_tenth():
    steps = [1000.0, 1000.0, *range(16), 1000.0, 1000.0]
    assert typical(steps) == 7.5
    assert typical([5.0]) == 5.0
    assert typical([1.0, 2.0, 9.0]) == 2.0


def test_no_steps_are_no_number():
    with pytest.raises(ValueError, match="no step"):
        typical([])


def test_ratio_is_between_runs_of_the_same_round():
    drift = np.exp(np.linspace(0, 3, 10))  # the machine gets 20 times slower
    found = compare(2.0 * drift, drift)
    assert found.ratio == pytest.approx(2.0)
    assert found.low == pytest.approx(2.0)
    assert found.high == pytest.approx(2.0)
    assert found.p is not None
    assert found.p < 1e-5


def test_runs_without_a_positive_number_in_both_are_no_pairs():
    assert compare([1.0, 0.0, math.inf, 2.0], [1.0, 1.0, 1.0, math.nan]).pairs == 1
    assert compare([0.0], [1.0]).ratio is None
    assert compare([], []).pairs == 0


@pytest.mark.parametrize("pairs", [1, FEWEST_PAIRS - 1])
def test_few_pairs_have_a_ratio_and_no_interval(pairs):
    found = compare(*_noisy(pairs))
    assert found.ratio is not None
    assert (found.low, found.high, found.p, found.error, found.detectable(0.05, True)) == (None, None, None, None, None)


@pytest.mark.parametrize("pairs", [6, 10])
def test_interval_is_around_the_ratio(pairs):
    found = compare(*_noisy(pairs, 1.5))
    assert found.low < found.ratio < found.high
    assert found.low < 1.5 < found.high


@given(st.lists(st.tuples(_POSITIVE, _POSITIVE), min_size=6, max_size=12))
def test_exchanging_the_two_inverts_the_ratio_and_keeps_the_p_value(pairs):
    ours, theirs = zip(*pairs, strict=True)
    there, back = compare(ours, theirs), compare(theirs, ours)
    assert there.ratio == pytest.approx(1 / back.ratio, rel=1e-6)
    assert there.p == pytest.approx(back.p, abs=1e-4)


@given(st.lists(st.tuples(_POSITIVE, _POSITIVE), min_size=6, max_size=12), st.floats(1e-3, 1e3))
def test_units_do_not_matter(pairs, factor):
    ours, theirs = zip(*pairs, strict=True)
    plain, scaled = compare(ours, theirs), compare([factor * a for a in ours], [factor * b for b in theirs])
    assert scaled.ratio == pytest.approx(plain.ratio, rel=1e-6)
    assert scaled.low == pytest.approx(plain.low, rel=1e-6)


def test_one_run_in_five_may_be_anything():
    ours, theirs = _noisy(10, 1.02)
    ours[3], theirs[7] = ours[3] * 50, theirs[7] * 50
    assert compare(ours, theirs).ratio == pytest.approx(1.02, rel=0.02)


def test_same_runs_give_the_same_interval():
    assert compare(*_noisy(10)) == compare(*_noisy(10))


def test_statistic_of_untrimmed_pairs_is_students_t():
    """With fewer than five pairs nothing is trimmed: the simulated distribution must be the one that is known."""
    quantiles = np.quantile(statistics._null(4).sizes, [0.5, 0.9, 0.99])
    assert quantiles == pytest.approx(stats.t.ppf([0.75, 0.95, 0.995], 3), rel=0.02)


@pytest.mark.parametrize(("pairs", "level"), [(6, 0.05), (10, 0.005)])
def test_detectable_difference_is_found_in_eight_of_ten_benchmarks(pairs, level):
    """A difference as large as the typical benchmark says it could have shown."""
    said = [compare(*_noisy(pairs, seed=seed)).detectable(level, True) for seed in range(200)]
    planted = float(np.median(said))
    found = [compare(*_noisy(pairs, planted, seed=1000 + seed)) for seed in range(300)]
    share = np.mean([f.p < level and not f.may_be(1.0) for f in found])
    assert 0.72 <= share <= 0.88


def test_more_comparisons_make_it_harder_to_show_a_difference():
    found = compare(*_noisy(10))
    assert 1 < found.detectable(0.05, True) < found.detectable(0.05 / 20, True)
    assert found.detectable(0.05, False) <= found.detectable(0.05, True)


def test_holm_multiplies_the_smallest_by_their_number_and_keeps_the_order():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=20))
def test_holm_never_makes_a_p_value_smaller_nor_changes_their_order(p_values):
    corrected = holm(p_values)
    assert all(p <= q <= 1 for p, q in zip(p_values, corrected, strict=True))
    assert [corrected[i] for i in np.argsort(p_values, kind="stable")] == sorted(corrected)
