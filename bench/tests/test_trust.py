"""Whether reports are to be believed: what they say of machines of which the truth is known.

Rates are over simulated reports with fixed seeds: 60 of each machine, or 200 in a slow test. A 95 % interval for a rate (Clopper
and Pearson's) must reach to what was promised.
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

MACHINES = [simulation.quiet, simulation.drift, simulation.outliers, simulation.autocorrelated]
TWO, FIVE = ("a", "b"), ("a", "b", "c", "d", "e")
# Each machine, with one comparison or with four.
VARIED = [(simulation.quiet, FIVE), (simulation.drift, TWO), (simulation.outliers, FIVE), (simulation.autocorrelated, TWO)]
SIZES = [60, pytest.param(200, marks=pytest.mark.slow)]

each_size = pytest.mark.parametrize("reports", SIZES)


def _claims(run: Run, control: bool = False) -> list[Claim]:
    return [claim for claims in judge(run).claims for claim in claims if claim.control == control]


def _at_least(count: int, rate: float, reports: int) -> bool:
    return stats.binomtest(count, reports).proportion_ci(0.95).high >= rate


def _count(said: Callable[[Run], bool], reports: int, noise: simulation.Noise, **more) -> int:
    return sum(said(simulation.simulate(noise, seed, **more)) for seed in range(reports))


@each_size
@pytest.mark.parametrize(("noise", "names"), VARIED)
def test_variants_that_are_the_same_are_called_different_in_at_most_one_report_of_twenty(noise, names, reports):
    wrong = _count(lambda run: any(claim.call == "different" for claim in _claims(run)), reports, noise, names=names)
    assert wrong <= 0.05 * reports


@each_size
@pytest.mark.parametrize("noise", [simulation.quiet, simulation.outliers])
def test_control_fails_in_at_most_one_sound_report_of_a_hundred(noise, reports):
    assert _count(lambda run: judge(run).trusted is False, reports, noise) <= 0.02 * reports  # whose 95 % interval holds 1 %


@each_size
@pytest.mark.parametrize(
    ("noise", "names", "rounds"),
    [(simulation.drift, FIVE, 6), (simulation.autocorrelated, FIVE, 7), (simulation.outliers, TWO, 6)],
)
def test_fewer_rounds_are_no_less_honest(noise, names, rounds, reports):
    wrong = _count(lambda run: any(c.call == "different" for c in _claims(run)), reports, noise, rounds=rounds, names=names)
    assert wrong <= 0.05 * reports


@each_size
@pytest.mark.parametrize("names", [TWO, FIVE], ids=["one comparison", "four"])
def test_two_percent_are_found_with_the_default_budget_on_a_quiet_machine(names, reports):
    found = _count(lambda run: _claims(run)[0].call == "different", reports, simulation.quiet, slower={"b": 0.02}, names=names)
    assert found >= 0.95 * reports


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.006, 0.009])
def test_stopping_when_the_interval_is_narrow_keeps_the_promises(spread):
    """As `--until-precise 1%` does, on a machine where it takes some 7 or 12 rounds."""
    rng, reports = np.random.default_rng(1), 100
    wrong = covered = 0
    for _ in range(reports):
        pairs = list(rng.normal(0, spread * math.sqrt(2), FEWEST_PAIRS))
        while (found := compare(np.exp(pairs), np.ones(len(pairs)))).high / found.low > 1.01**2:
            pairs.append(rng.normal(0, spread * math.sqrt(2)))
        wrong += found.p < 0.05 and not found.may_be(1.0)
        covered += found.may_be(1.0)
    assert wrong <= 0.05 * reports
    assert _at_least(covered, 0.95, reports)


@pytest.mark.parametrize(
    ("noise", "reports"), [(simulation.quiet, 60), *(pytest.param(noise, 200, marks=pytest.mark.slow) for noise in MACHINES)]
)
def test_stopping_when_the_interval_is_narrow_keeps_the_promise_on_any_machine(noise, reports):
    """With judge and control and all, looking after each round from the sixth to the eleventh."""
    wrong = 0
    for seed in range(reports):
        run = simulation.simulate(noise, seed, rounds=11)
        for rounds in range(FEWEST_PAIRS, 12):
            (claim,) = _claims(_first(rounds, run))
            if claim.comparison.high / claim.comparison.low <= 1.02**2:
                break
        wrong += claim.call == "different"
    assert wrong <= 0.05 * reports


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


@each_size
@pytest.mark.parametrize(
    ("noise", "slower"),
    [(simulation.quiet, 0.02), (simulation.drift, 0.5), (simulation.outliers, 0.0), (simulation.autocorrelated, 0.02)],
)
def test_estimate_is_unbiased_and_its_interval_holds_the_truth(noise, slower, reports):
    truth = math.log(1 + slower)
    found = [_claims(simulation.simulate(noise, seed, {"b": slower}))[0].comparison for seed in range(reports)]
    errors = np.array([math.log(comparison.ratio) - truth for comparison in found])
    # Medians, as an outlier that hits more runs of one side than can be trimmed says nothing of bias.
    assert abs(np.median(errors)) < 4 * 1.25 * stats.median_abs_deviation(errors, scale="normal") / math.sqrt(reports)
    covered = sum(math.log(c.low) <= truth <= math.log(c.high) for c in found)
    assert _at_least(covered, 0.95, reports)


@each_size
@pytest.mark.parametrize("noise", [simulation.drift, simulation.outliers])
def test_large_difference_is_found_on_any_machine(noise, reports):
    found = _count(lambda run: _claims(run)[0].call == "different", reports, noise, slower={"b": 0.5})
    assert found >= 0.95 * reports


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
