"""Whether reports are to be believed: what they say of machines of which the truth is known.

Rates are over 200 simulated reports; a 95 % interval for a rate (Clopper and Pearson's) must reach to what was promised.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from bench.tests import simulation
from scipy import stats

from penstock_bench.outcome import Run
from penstock_bench.statistics import FEWEST_PAIRS, compare
from penstock_bench.verdict import Claim, judge

REPORTS = 200
MACHINES = [simulation.quiet, simulation.drift, simulation.outliers, simulation.autocorrelated]
NULL_VARIANTS = ("a", "b", "c", "d", "e")


def _claims(run: Run, control: bool = False) -> list[Claim]:
    return [claim for claims in judge(run).claims for claim in claims if claim.control == control]


def _at_least(count: int, rate: float, reports: int = REPORTS) -> bool:
    return stats.binomtest(count, reports).proportion_ci(0.95).high >= rate


def _count(said: Callable[[Run], bool], noise: simulation.Noise, **more) -> int:
    return sum(said(simulation.simulate(noise, seed, **more)) for seed in range(REPORTS))


@pytest.mark.parametrize("noise", MACHINES)
@pytest.mark.parametrize("names", [("a", "b"), NULL_VARIANTS], ids=["one comparison", "four"])
def test_variants_that_are_the_same_are_called_different_in_at_most_one_report_of_twenty(noise, names):
    wrong = _count(lambda run: any(claim.call == "different" for claim in _claims(run)), noise, names=names)
    assert wrong <= 0.05 * REPORTS


@pytest.mark.parametrize("noise", MACHINES)
def test_control_fails_in_at_most_one_sound_report_of_a_hundred(noise):
    assert _count(lambda run: judge(run).trusted is False, noise) <= 0.02 * REPORTS  # whose 95 % interval holds 1 %


@pytest.mark.parametrize("noise", MACHINES)
@pytest.mark.parametrize("rounds", [6, 7])
@pytest.mark.parametrize("names", [("a", "b"), NULL_VARIANTS], ids=["one comparison", "four"])
def test_fewer_rounds_are_no_less_honest(names, rounds, noise):
    wrong = _count(lambda run: any(c.call == "different" for c in _claims(run)), noise, rounds=rounds, names=names)
    assert wrong <= 0.05 * REPORTS


@pytest.mark.parametrize("names", [("a", "b"), NULL_VARIANTS], ids=["one comparison", "four"])
def test_two_percent_are_found_with_the_default_budget_on_a_quiet_machine(names):
    found = _count(lambda run: _claims(run)[0].call == "different", simulation.quiet, slower={"b": 0.02}, names=names)
    assert found >= 0.95 * REPORTS


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.006, 0.009])
def test_stopping_when_the_interval_is_narrow_keeps_the_promises(spread):
    """As `--until-precise 1%` does, on a machine where it takes some 7 or 12 rounds."""
    rng, reports = np.random.default_rng(1), REPORTS // 2  # each takes long
    wrong = covered = 0
    for _ in range(reports):
        pairs = list(rng.normal(0, spread * math.sqrt(2), FEWEST_PAIRS))
        while (found := compare(np.exp(pairs), np.ones(len(pairs)))).high / found.low > 1.01**2:
            pairs.append(rng.normal(0, spread * math.sqrt(2)))
        wrong += found.p < 0.05 and not found.may_be(1.0)
        covered += found.may_be(1.0)
    assert wrong <= 0.05 * reports
    assert _at_least(covered, 0.95, reports)


@pytest.mark.parametrize("noise", MACHINES)
def test_stopping_when_the_interval_is_narrow_keeps_the_promise_on_any_machine(noise):
    """With judge and control and all, looking after each round from the sixth to the eleventh."""
    wrong = 0
    for seed in range(REPORTS):
        run = simulation.simulate(noise, seed, rounds=11)
        for rounds in range(FEWEST_PAIRS, 12):
            (claim,) = _claims(_first(rounds, run))
            if claim.comparison.high / claim.comparison.low <= 1.02**2:
                break
        wrong += claim.call == "different"
    assert wrong <= 0.05 * REPORTS


def _first(rounds: int, run: Run) -> Run:
    (outcome,) = run.outcomes
    samples = tuple(sample for sample in outcome.samples if sample.round < rounds)
    return replace(run, outcomes=(replace(outcome, samples=samples),))


def test_comparison_without_a_control_beside_it_is_no_claim():
    """Though another workload of the report has one."""
    run = simulation.simulate(simulation.quiet, 1, {"b": 0.5})
    (outcome,) = run.outcomes
    alone = replace(outcome, samples=tuple(sample for sample in outcome.samples if not sample.again))
    both = judge(replace(run, outcomes=(outcome, alone)))
    assert both.trusted is True
    assert [[claim.call for claim in claims] for claims in both.claims] == [["not shown", "different"], ["not judged"]]


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
