"""The comparison of live pairs: what moves it, what does not, and how often it is right."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_bench.levels import FEWEST_ROUNDS, compare_rounds, locations
from penstock_bench.live_pairs import RoundPairs


def pairs(number: int, logs, references=None, others=None) -> RoundPairs:
    logs = np.asarray(logs, float)
    nothing = np.full(len(logs), math.nan)
    return RoundPairs(
        number,
        logs,
        nothing if references is None else np.asarray(references, float),
        np.zeros(len(logs)) if others is None else np.asarray(others, float),
    )


def simulated(rng, rounds: int, turns: int, truth: float, between: float = 0.015, within: float = 0.06) -> list[RoundPairs]:
    """Rounds that differ permanently, with turns that are often disturbed: Student's t with 3 degrees of freedom."""
    scale = within / math.sqrt(3)
    return [pairs(number, truth + rng.normal(0, between) + scale * rng.standard_t(3, turns)) for number in range(rounds)]


@pytest.mark.parametrize("rounds", [0, FEWEST_ROUNDS - 1])
def test_few_rounds_have_a_ratio_and_no_interval(rounds):
    comparison = compare_rounds([pairs(number, [0.1, 0.1]) for number in range(rounds)])
    assert comparison.pairs == rounds
    assert comparison.low is comparison.high is comparison.p is comparison.error is None
    assert comparison.ratio == (None if not rounds else pytest.approx(math.exp(0.1)))
    assert comparison.turns == 2 * rounds


def test_a_hundred_turns_of_one_round_are_one_observation():
    """The turns agree within 0.1 %, and the rounds differ by 2 %: the interval is over rounds."""
    rng = np.random.default_rng(0)
    apart = [-0.03, -0.01, 0.01, 0.03]
    comparison = compare_rounds([pairs(n, mean + 0.001 * rng.standard_normal(100)) for n, mean in enumerate(apart)])
    assert comparison.error == pytest.approx(np.std(apart, ddof=1) / 2, rel=0.05)
    assert comparison.low < 0.97
    assert comparison.high > 1.03
    assert comparison.p > 0.5


def test_a_disturbed_turn_moves_its_round_by_little():
    calm = [pairs(n, np.linspace(-0.01, 0.01, 11)) for n in range(4)]
    before = locations(calm)
    logs = calm[0].logs.copy()
    logs[0] = 3.0  # twenty times as slow
    after = locations([pairs(0, logs), *calm[1:]])
    assert abs(after[0] - before[0]) < 0.005
    assert after[1:] == pytest.approx(before[1:], abs=1e-3)


def test_rounds_of_a_single_turn_change_nothing_for_the_others():
    logs = np.random.default_rng(0).normal(0, 0.05, 5)
    alone = locations([pairs(0, logs)])
    among = locations([pairs(0, logs), *(pairs(n, [0.01 * n]) for n in range(1, 7))])
    assert among[0] == pytest.approx(alone[0])
    assert among[1:] == pytest.approx(0.01 * np.arange(1, 7))


def test_a_turn_weighs_less_when_others_used_the_machine():
    logs, others = [0.0, 0.0, 0.0, 0.02, 0.02], [0.0, 0.0, 0.0, 0.5, 0.5]
    (alike,), (weighted,) = locations([pairs(0, logs)]), locations([pairs(0, logs, others=others)])
    assert abs(weighted) < 0.1 * abs(alike) + 1e-4


def test_a_reference_that_moves_with_the_pairs_is_taken_out_and_another_one_is_not():
    rng = np.random.default_rng(1)
    machine = [rng.normal(0, 0.1, 12) for _ in range(6)]
    own = [rng.normal(0, 0.01, 12) for _ in range(6)]
    helped = locations([pairs(n, m + o, references=m) for n, (m, o) in enumerate(zip(machine, own, strict=True))])
    assert np.abs(helped).max() < 0.02
    unrelated = [rng.normal(0, 0.1, 12) for _ in range(6)]
    with_it = locations([pairs(n, o, references=u) for n, (o, u) in enumerate(zip(own, unrelated, strict=True))])
    without = locations([pairs(n, o) for n, o in enumerate(own)])
    assert with_it == pytest.approx(without)


def test_a_variant_that_slows_the_reference_down_gains_nothing_by_it():
    """It leaves cold caches behind, say, so the kernel takes 4 % longer around its blocks; the two are equally fast."""
    rng = np.random.default_rng(2)
    machine = [rng.normal(0, 0.05, 12) for _ in range(12)]
    own = [rng.normal(0, 0.01, 12) for _ in range(12)]
    comparison = compare_rounds([pairs(n, m + o, references=m + 0.04) for n, (m, o) in enumerate(zip(machine, own, strict=True))])
    assert abs(math.log(comparison.ratio)) < 0.01


def test_counted_numbers_which_are_equal_in_all_turns_can_be_compared():
    comparison = compare_rounds([pairs(n, [0.1] * 6, references=np.arange(6) * 0.01) for n in range(4)])
    assert comparison.ratio == pytest.approx(math.exp(0.1))
    assert comparison.low == comparison.high == pytest.approx(comparison.ratio)


def test_both_processes_of_the_baseline_count():
    first, second = [pairs(n, [0.02, 0.04]) for n in range(5)], [pairs(n, [0.00, 0.02]) for n in range(4)]
    numbers = compare_rounds(first, second)
    assert numbers.pairs == 5
    assert math.log(numbers.ratio) == pytest.approx((4 * 0.02 + 0.03) / 5)  # a round without the second has the first


def test_both_processes_of_the_baseline_make_an_interval_narrower_and_not_biased():
    """All three processes have the same skewed noise, so the truth is that there is no difference."""
    rng = np.random.default_rng(4)
    held, widths = [], {"one": [], "both": []}
    for _ in range(100):
        first, second = [], []
        for number in range(12):
            ours, one, other = np.log(rng.gamma(2.0, 0.02, (3, 8)) + 1)
            first.append(pairs(number, ours - one))
            second.append(pairs(number, ours - other))
        both = compare_rounds(first, second)
        held.append(both.low <= 1 <= both.high)
        widths["both"].append(both.high / both.low - 1)
        alone = compare_rounds(first)
        widths["one"].append(alone.high / alone.low - 1)
    assert np.mean(held) >= 0.92
    assert np.mean(widths["both"]) < 0.92 * np.mean(widths["one"])


@given(st.lists(st.lists(st.floats(-0.5, 0.5), min_size=2, max_size=8), min_size=4, max_size=8))
def test_swapping_the_two_inverts_the_ratio_and_keeps_the_p_value(rounds):
    there = compare_rounds([pairs(n, logs) for n, logs in enumerate(rounds)])
    back = compare_rounds([pairs(n, [-log for log in logs]) for n, logs in enumerate(rounds)])
    assert there.ratio * back.ratio == pytest.approx(1, rel=1e-6)
    assert there.low * back.high == pytest.approx(1, rel=1e-4)
    assert there.p == pytest.approx(back.p, abs=1e-4)


@pytest.mark.parametrize(("rounds", "truth"), [(4, 0.0), (12, 0.02)])
def test_the_interval_holds_the_truth_in_95_of_100_reports(rounds, truth):
    rng = np.random.default_rng(rounds)
    reports = 200
    made = [compare_rounds(simulated(rng, rounds, 8, truth)) for _ in range(reports)]
    holds = sum(one.low <= math.exp(truth) <= one.high for one in made)
    assert holds >= 0.95 * reports - 3 * math.sqrt(reports * 0.05 * 0.95)
    if truth == 0:
        assert sum(one.p < 0.05 for one in made) <= 0.05 * reports + 3 * math.sqrt(reports * 0.05 * 0.95)


def test_two_per_cent_are_found_with_the_noise_of_a_shared_machine_and_twelve_rounds():
    rng = np.random.default_rng(3)
    found = sum(compare_rounds(simulated(rng, 12, 20, 0.02)).p < 0.05 for _ in range(100))
    assert found >= 85


def test_what_could_have_been_shown_is_shown_in_8_of_10_reports():
    rng = np.random.default_rng(4)
    seen = math.log(np.median([compare_rounds(simulated(rng, 6, 8, 0.0)).detectable(0.05, False) for _ in range(100)]))
    found = np.mean([compare_rounds(simulated(rng, 6, 8, seen)).p < 0.05 for _ in range(200)])
    assert 0.7 < found < 0.9
