"""Whether reports are to be believed: what they say of machines of which the truth is known.

Rates are over 200 simulated reports; a 95 % interval for a rate (Clopper and Pearson's) must reach to what was promised.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from tests.bench import simulation

from penstock.bench.model import Run
from penstock.bench.summary import Claim, judge

REPORTS = 200
MACHINES = [simulation.quiet, simulation.drift, simulation.outliers, simulation.autocorrelated]
NULL_VARIANTS = ("a", "b", "c", "d", "e")


def _claims(run: Run, control: bool = False) -> list[Claim]:
    return [claim for claims in judge(run).claims for claim in claims if claim.control == control]


def _at_most(count: int, rate: float) -> bool:
    return stats.binomtest(count, REPORTS).proportion_ci(0.95).low <= rate


def _at_least(count: int, rate: float) -> bool:
    return stats.binomtest(count, REPORTS).proportion_ci(0.95).high >= rate


def _count(said: Callable[[Run], bool], noise: simulation.Noise, **more) -> int:
    return sum(said(simulation.simulate(noise, seed, **more)) for seed in range(REPORTS))


@pytest.mark.parametrize("noise", MACHINES)
@pytest.mark.parametrize("names", [("a", "b"), NULL_VARIANTS], ids=["one comparison", "four"])
def test_variants_that_are_the_same_are_called_different_in_at_most_one_report_of_twenty(noise, names):
    wrong = _count(lambda run: any(claim.call == "different" for claim in _claims(run)), noise, names=names)
    assert _at_most(wrong, 0.05)


@pytest.mark.parametrize("noise", MACHINES)
def test_control_fails_in_at_most_one_sound_report_of_a_hundred(noise):
    assert _at_most(_count(lambda run: judge(run).trusted is False, noise), 0.01)


@pytest.mark.parametrize("rounds", [6, 10])
def test_fewer_rounds_are_no_less_honest(rounds):
    wrong = _count(lambda run: any(c.call == "different" for c in _claims(run)), simulation.outliers, rounds=rounds)
    assert _at_most(wrong, 0.05)


def test_two_percent_are_found_with_the_default_budget_on_a_quiet_machine():
    found = _count(lambda run: _claims(run)[0].call == "different", simulation.quiet, slower={"b": 0.02})
    assert _at_least(found, 0.95)
    assert found >= 0.95 * REPORTS


@pytest.mark.parametrize("noise", MACHINES)
@pytest.mark.parametrize("slower", [0.0, 0.02, 0.5])
def test_estimate_is_unbiased_and_its_interval_holds_the_truth(noise, slower):
    truth = math.log(1 + slower)
    found = [_claims(simulation.simulate(noise, seed, {"b": slower}))[0].comparison for seed in range(REPORTS)]
    errors = np.array([math.log(comparison.ratio) - truth for comparison in found])
    # Medians, as an outlier that hits more runs of one side than can be trimmed says nothing of bias.
    assert abs(np.median(errors)) < 4 * 1.25 * stats.median_abs_deviation(errors, scale="normal") / math.sqrt(REPORTS)
    covered = sum(math.log(c.low) <= truth <= math.log(c.high) for c in found)
    assert _at_least(covered, 0.95)


@pytest.mark.parametrize("noise", MACHINES)
def test_large_difference_is_found_on_any_machine(noise):
    found = _count(lambda run: _claims(run)[0].call == "different", noise, slower={"b": 0.5})
    assert found >= 0.95 * REPORTS


def test_control_that_fails_takes_back_every_claim():
    """Its second runs are 5 % slower, as if each had found something left running."""
    run = simulation.simulate(simulation.quiet, 1, {"b": 0.5})
    (outcome,) = run.outcomes
    samples = tuple(
        replace(sample, values={"m0": 1.05 * sample.values["m0"]}) if sample.again else sample for sample in outcome.samples
    )
    broken = replace(run, outcomes=(replace(outcome, samples=samples),))
    assert judge(run).trusted is True
    assert judge(broken).trusted is False
    assert [claim.call for claim in _claims(broken)] == ["not judged"]
