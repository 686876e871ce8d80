"""Judge a run: compute medians, corrected comparisons and a verdict on each target from its samples.

The times of a workload are judged only if its A/A control found no difference. The numbers of a scored workload are compared
with the targets directly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

from penstock_bench import statistics
from penstock_bench.levels import FEWEST_ROUNDS, compare_rounds
from penstock_bench.live_pairs import round_pairs
from penstock_bench.model import Metric, Target
from penstock_bench.moderation import moderate
from penstock_bench.number_format import number
from penstock_bench.outcome import Outcome, Run
from penstock_bench.statistics import Comparison

# The significance level of the controls' test, after Holm's correction. It is stricter than the level of claims, because a false
# alarm discards a sound report and the real differences in it. A broken harness is detected at any level.
CONTROL_LEVEL = 0.01

Call = Literal["different", "not shown", "not judged"]


@dataclass(frozen=True)
class Row:
    """A variant's row in the table of one metric.

    Attributes:
      variant: the variant's name.
      runs: the number of its runs.
      median, low, high: the median, the smallest and the largest number of its runs.
      of_ideal: the median divided by the metric's ideal; None if there is no ideal.
    """

    variant: str
    runs: int
    median: float
    low: float
    high: float
    of_ideal: float | None


@dataclass(frozen=True)
class Claim:
    """The result of comparing two variants, corrected for the number of comparisons in the report.

    Attributes:
      metric: the compared metric.
      variant, baseline: the names of the two variants.
      control: whether this is an A/A control: the variant compared with itself.
      comparison: the result before the correction.
      p_corrected: corrected by Holm's method over all claims of the report, or over all of its controls; None without a p-value.
      detectable: the smallest ratio > 1 that would have been called different in 8 of 10 such reports.
      call: the verdict. It is "different" only if the corrected test and the interval both say so, and no control failed.
    """

    metric: Metric
    variant: str
    baseline: str
    control: bool
    comparison: Comparison
    p_corrected: float | None
    detectable: float | None
    call: Call


@dataclass(frozen=True)
class Verdict:
    """The outcome of a target.

    Attributes:
      target: the target.
      reached: the measured value, in the unit of the target's bound; the median or the total if the target is for all variants.
        None without a measurement.
      met: whether the target is met. A ratio is judged only if its interval is entirely on one side of the bound; other numbers
        by their median. None if the target cannot be judged, or the interval contains the bound.
      why_not: why the target is not judged; None if it is.
      counted, within: for a target for all variants, how many it counts, and how many of these are within its bound.
      worst: for a target for all variants, the number of the variant that is furthest beyond the bound.
      misses: the variants that are not within the bound, each with its number or the reason; the worst first.
      exempt: from a reason to the number of variants that the target does not count for it.
    """

    target: Target
    reached: float | None
    met: bool | None
    why_not: str | None = None
    counted: int = 0
    within: int = 0
    worst: float | None = None
    misses: tuple[str, ...] = ()
    exempt: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Judgement:
    """All claims and verdicts of a run.

    Attributes:
      trusted: whether no A/A control showed a difference; None if the controls could not be judged, or nothing was timed.
      claims: one tuple for each outcome of the run; its controls come first.
      verdicts: one tuple for each outcome of the run.
    """

    trusted: bool | None
    claims: tuple[tuple[Claim, ...], ...]
    verdicts: tuple[tuple[Verdict, ...], ...]


@dataclass(frozen=True)
class _Pair:
    """Two variants to compare, of the outcome with this index; a control is compared with itself."""

    index: int
    metric: Metric
    variant: str
    baseline: str
    comparison: Comparison

    @property
    def control(self) -> bool:
        """Tell whether a variant is compared with itself."""
        return self.variant == self.baseline


def rows(outcome: Outcome, metric: Metric) -> list[Row]:
    """Return one row for each variant that ran, in the order of the workload."""
    made = []
    # A scored workload's samples may be parts of its variants, and have names that the workload does not list.
    names = [sample.variant for sample in outcome.samples] if outcome.workload.scored else None
    for name in dict.fromkeys(names or [variant.name for variant in outcome.workload.variants]):
        values = list(outcome.by_round(name, metric.name).values())
        if values:
            middle = median(values)
            of_ideal = middle / metric.ideal if metric.ideal else None
            made.append(Row(name, len(values), middle, min(values), max(values), of_ideal))
    return made


def judge(run: Run) -> Judgement:
    """Compare each variant with its baseline and each control with itself, and judge the targets."""
    found = [pair for index, outcome in enumerate(run.outcomes) for pair in _pairs(index, outcome)]
    moderated = moderate([pair.comparison for pair in found], [pair.index for pair in found])
    pairs = [replace(pair, comparison=comparison) for pair, comparison in zip(found, moderated, strict=True)]
    comparisons = {(pair.index, pair.metric.name, pair.variant, pair.baseline): pair.comparison for pair in pairs}
    full = run.size == "full"
    controls = _claims([pair for pair in pairs if pair.control], lambda pair: full)
    calls = {claim.call for _, claim in controls} - {"not judged"}
    trusted = "different" not in calls if calls else None
    # A comparison is judged only if the control of the same workload and metric could be judged.
    judged = {(index, claim.metric) for index, claim in controls if claim.call != "not judged"}
    others = [pair for pair in pairs if not pair.control]
    claims = controls + _claims(others, lambda pair: trusted is True and (pair.index, pair.metric) in judged)
    return Judgement(
        trusted,
        tuple(tuple(claim for at, claim in claims if at == index) for index in range(len(run.outcomes))),
        tuple(
            tuple(
                _scored_verdict(outcome, target)
                if outcome.workload.scored
                else _verdict(
                    outcome,
                    target,
                    comparisons.get((index, target.metric, target.variant or "", target.relative_to or "")),
                    trusted,
                    {metric.name for at, metric in judged if at == index},
                )
                for target in outcome.workload.targets
            )
            for index, outcome in enumerate(run.outcomes)
        ),
    )


def compare(outcome: Outcome, metric: str, variant: str, baseline: str) -> Comparison:
    """Compare a variant's runs with the baseline's runs of the same rounds, or turn by turn if they took turns.

    If both names are equal, compare the control's second runs with its first ones.
    """
    if outcome.live:
        failed = {failure.variant for failure in outcome.failures}
        seat = (variant, variant == baseline)
        again = [] if variant == baseline else round_pairs(outcome.blocks, metric, seat, (baseline, True), failed)
        return compare_rounds(round_pairs(outcome.blocks, metric, seat, (baseline, False), failed), again)
    ours = outcome.by_round(variant, metric, again=variant == baseline)
    theirs = outcome.by_round(baseline, metric)
    both = [number for number in ours if number in theirs]
    return statistics.compare([ours[number] for number in both], [theirs[number] for number in both])


def fewest_rounds(outcome: Outcome) -> int:
    """Return the number of rounds below which nothing is judged."""
    return FEWEST_ROUNDS if outcome.live else statistics.FEWEST_PAIRS


def _pairs(index: int, outcome: Outcome) -> Iterator[_Pair]:
    """Yield a workload's comparisons for which at least one round has a number of both variants."""
    workload = outcome.workload
    for metric in workload.metrics:
        wanted = [(outcome.control, outcome.control)]
        wanted += [(variant.name, workload.baseline) for variant in workload.variants if variant.name != workload.baseline]
        wanted += [(target.variant or "", target.relative_to) for target in workload.targets if target.metric == metric.name]
        for variant, baseline in dict.fromkeys(wanted):
            if variant and baseline:
                comparison = compare(outcome, metric.name, variant, baseline)
                if comparison.pairs:
                    yield _Pair(index, metric, variant, baseline, comparison)


def _claims(pairs: Sequence[_Pair], judged: Callable[[_Pair], bool]) -> list[tuple[int, Claim]]:
    """Return a claim for each pair, with its outcome's index; Holm's correction is over all that have a p-value."""
    tested = [pair for pair in pairs if pair.comparison.p is not None]
    p_values = statistics.holm([pair.comparison.p for pair in tested if pair.comparison.p is not None])
    corrected = dict(zip(map(id, tested), p_values, strict=True))
    claims = []
    for pair in pairs:
        p = corrected.get(id(pair))
        call: Call = "not judged" if p is None or not judged(pair) else _call(pair, p)
        level = (CONTROL_LEVEL if pair.control else statistics.LEVEL) / max(len(tested), 1)  # Holm's strictest
        detectable = pair.comparison.detectable(level, by_interval=not pair.control)
        claims.append(
            (pair.index, Claim(pair.metric, pair.variant, pair.baseline, pair.control, pair.comparison, p, detectable, call))
        )
    return claims


def _call(pair: _Pair, p_corrected: float) -> Call:
    """Decide whether two variants are called different."""
    if pair.control:
        return "different" if p_corrected < CONTROL_LEVEL else "not shown"
    return "different" if p_corrected < statistics.LEVEL and not pair.comparison.may_be(1.0) else "not shown"


def _verdict(
    outcome: Outcome, target: Target, comparison: Comparison | None, trusted: bool | None, controlled: Collection[str]
) -> Verdict:
    """Judge a target of a timed workload.

    Args:
      comparison: of the target's two variants; None if a number is the target, or if there is no pair.
      controlled: names of the outcome's metrics whose control was judged.
    """
    assert target.variant is not None, "a target for all variants is one of a scored workload"
    metric = outcome.workload.metric(target.metric)
    if target.relative_to is None:
        values = outcome.by_round(target.variant, metric.name)
        reached = median(values.values()) if values else None
        low = high = reached if len(values) >= fewest_rounds(outcome) else None
    elif comparison is None:
        reached = low = high = None
    else:
        reached, low, high = comparison.ratio, comparison.low, comparison.high
    why_not = _why_not(outcome, reached, None if trusted and metric.name not in controlled else trusted)
    if why_not is None and low is not None and high is not None and low < target.bound < high:
        why_not = "its interval holds the bound"
    if why_not or low is None or high is None:
        return Verdict(target, reached, None, why_not or "too few rounds")
    return Verdict(target, reached, low >= target.bound if metric.better == "higher" else high <= target.bound)


@dataclass(frozen=True)
class _Entry:
    """One variant's number for a target over all variants; `size` is infinite if the variant misses without a number."""

    variant: str
    size: float
    said: str


def _scored_verdict(outcome: Outcome, target: Target) -> Verdict:
    """Judge a target of a scored workload: one run of each variant is enough, and there is no control."""
    metric = outcome.workload.metric(target.metric)
    entries, exempt = _entries(outcome, metric, target)
    misses = sorted((entry for entry in entries if not _within(metric, entry.size, target.bound)), key=lambda entry: -entry.size)
    sizes = [entry.size for entry in entries]
    finite = [size for size in sizes if math.isfinite(size)]
    middle = median(sizes) if sizes and target.over == "median" else median(finite) if finite else None
    reached = sum(sizes) if target.over == "total" else middle
    within = len(entries) - len(misses)
    met = {
        "every": not misses,
        "half": within >= len(entries) / 2,
        "median": middle is not None and _within(metric, middle, target.bound),
        "total": _within(metric, sum(sizes), target.bound),
    }[target.over]
    worst = (min if metric.better == "higher" else max)(finite, default=None)
    # Half of the variants may be beyond the bound, so they are not listed.
    named = () if target.over == "half" else tuple(f"{entry.variant}: {entry.said}" for entry in misses)
    if not entries:
        return Verdict(target, None, None, "nothing to judge", exempt=exempt)
    return Verdict(target, reached, met, None, len(entries), within, worst, named, exempt)


def _entries(outcome: Outcome, metric: Metric, target: Target) -> tuple[list[_Entry], dict[str, int]]:
    """Return the variants that the target counts, and for each reason the number of variants that it does not count."""
    entries, exempt = [], Counter[str]()
    for sample in outcome.samples:
        if target.variant not in (None, sample.variant):
            continue
        value, remarks = sample.values.get(metric.name), sample.remarks
        if metric.name in remarks.missed:
            entries.append(_Entry(sample.variant, math.inf, remarks.missed[metric.name]))
        elif metric.name in remarks.exempt:
            exempt[remarks.exempt[metric.name]] += 1
        elif value is not None:
            size = abs(value) if metric.better == "zero" else value
            entries.append(_Entry(sample.variant, size, f"{number(value)} {metric.unit}"))
    if target.over == "every":
        found = {sample.variant for sample in outcome.samples}
        crashed = [failure for failure in outcome.failures if failure.variant not in found]
        entries += [_Entry(failure.variant, math.inf, f"failed: {failure.reason}") for failure in crashed]
    return entries, dict(exempt)


def _within(metric: Metric, value: float, bound: float) -> bool:
    """Tell whether a number is within a bound. Infinity stands for a miss, and is never within it."""
    return math.isfinite(value) and (value >= bound if metric.better == "higher" else value <= bound)


def _why_not(outcome: Outcome, reached: float | None, trusted: bool | None) -> str | None:
    """Return why a target of a timed workload cannot be judged; None where it can."""
    if reached is None:
        return "no measurement"
    if outcome.size == "quick":
        return "quick sizes"
    if trusted is None:
        return "no A/A control"
    return None if trusted else "the A/A control failed"
