"""Medians, ratios and verdicts of an outcome."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from penstock.bench.model import Metric, Outcome, Target


@dataclass(frozen=True)
class Row:
    """A variant's place in the table of one metric.

    Attributes:
      ratio: to the baseline, the median of the ratios within rounds; None without a baseline to compare with.
      of_ideal: the median over the metric's ideal.
    """

    variant: str
    median: float
    low: float
    high: float
    ratio: float | None
    of_ideal: float | None


@dataclass(frozen=True)
class Verdict:
    """What became of a target.

    Attributes:
      reached: in the target's terms; None where there is no measurement.
      met: None where that is not to be judged, for want of a measurement or of the full sizes.
    """

    target: Target
    reached: float | None
    met: bool | None


def rows(outcome: Outcome, metric: Metric) -> list[Row]:
    """One row for each variant that ran, in the order of the workload."""
    made = []
    for variant in outcome.workload.variants:
        values = list(_by_round(outcome, variant.name, metric.name).values())
        if not values:
            continue
        middle = median(values)
        of_ideal = middle / metric.ideal if metric.ideal else None
        baseline = outcome.workload.baseline
        against = ratio(outcome, metric.name, variant.name, baseline) if baseline else None
        made.append(Row(variant.name, middle, min(values), max(values), against, of_ideal))
    return made


def ratio(outcome: Outcome, metric: str, variant: str, baseline: str) -> float | None:
    """Median over the rounds of the variant's value divided by the baseline's in the same round."""
    ours, theirs = _by_round(outcome, variant, metric), _by_round(outcome, baseline, metric)
    ratios = [ours[number] / theirs[number] for number in ours if theirs.get(number)]
    return median(ratios) if ratios else None


def verdicts(outcome: Outcome) -> list[Verdict]:
    return [_verdict(outcome, target) for target in outcome.workload.targets]


def _verdict(outcome: Outcome, target: Target) -> Verdict:
    metric = next(metric for metric in outcome.workload.metrics if metric.name == target.metric)
    if target.relative_to is not None:
        reached = ratio(outcome, metric.name, target.variant, target.relative_to)
    else:
        values = _by_round(outcome, target.variant, metric.name)
        reached = median(values.values()) if values else None
    if reached is None or outcome.size == "quick":
        return Verdict(target, reached, None)
    return Verdict(target, reached, reached >= target.bound if metric.better == "higher" else reached <= target.bound)


def _by_round(outcome: Outcome, variant: str, metric: str) -> dict[int, float]:
    if any(failure.variant == variant for failure in outcome.failures):
        return {}
    return {sample.round: sample.values[metric] for sample in outcome.samples if sample.variant == variant}
