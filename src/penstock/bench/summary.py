"""What a run says: medians, comparisons corrected for their number, what the A/A controls make of them, targets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from penstock.bench import statistics
from penstock.bench.model import Metric, Outcome, Run, Target
from penstock.bench.statistics import Comparison

# Of a report's controls, after Holm. Stricter than the level of claims: each sound report that is thrown away is a
# difference that was there and is not told. A harness that is broken shows at any level.
CONTROL_LEVEL = 0.01

Call = Literal["different", "not shown", "not judged"]


@dataclass(frozen=True)
class Row:
    """A variant's place in the table of one metric.

    Attributes:
      low, high: of its runs.
      of_ideal: the median over the metric's ideal.
    """

    variant: str
    runs: int
    median: float
    low: float
    high: float
    of_ideal: float | None


@dataclass(frozen=True)
class Claim:
    """What is said of two variants, after all that the report compares was taken into account.

    Attributes:
      control: the variant is compared with itself.
      p_corrected: by Holm, over all claims of the report, or over all of its controls; None without a p-value.
      detectable: the smallest ratio > 1 that would have been called different in 8 of 10 such reports.
      call: "different" only where the corrected test and the interval both say so and no control failed.
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
    """What became of a target.

    Attributes:
      reached: in the target's terms; None where there is no measurement.
      met: of a ratio, only where all of its interval is on one side of the bound; of another metric, by the median. None where
        that is not to be judged, or the interval holds the bound.
      why_not: judged; None where it is.
    """

    target: Target
    reached: float | None
    met: bool | None
    why_not: str | None = None


@dataclass(frozen=True)
class Judgement:
    """What a run says.

    Attributes:
      trusted: whether the A/A controls came out as equal as they are; None where they could not be judged.
      claims: for each outcome; its controls come first.
      verdicts: for each outcome.
    """

    trusted: bool | None
    claims: tuple[tuple[Claim, ...], ...]
    verdicts: tuple[tuple[Verdict, ...], ...]


@dataclass(frozen=True)
class _Pair:
    """Two variants to compare, of the outcome in this place; a control is compared with itself."""

    place: int
    metric: Metric
    variant: str
    baseline: str
    comparison: Comparison

    @property
    def control(self) -> bool:
        return self.variant == self.baseline


def rows(outcome: Outcome, metric: Metric) -> list[Row]:
    """One row for each variant that ran, in the order of the workload."""
    made = []
    for variant in outcome.workload.variants:
        values = list(outcome.by_round(variant.name, metric.name).values())
        if values:
            middle = median(values)
            of_ideal = middle / metric.ideal if metric.ideal else None
            made.append(Row(variant.name, len(values), middle, min(values), max(values), of_ideal))
    return made


def judge(run: Run) -> Judgement:
    """Compare each variant with its baseline, and each control with itself."""
    pairs = [pair for place, outcome in enumerate(run.outcomes) for pair in _pairs(place, outcome)]
    full = run.size == "full"
    controls = _claims([pair for pair in pairs if pair.control], lambda pair: full)
    calls = {claim.call for _, claim in controls} - {"not judged"}
    trusted = "different" not in calls if calls else None
    # A comparison is as good as the control beside it: of the same workload and metric.
    judged = {(place, claim.metric) for place, claim in controls if claim.call != "not judged"}
    others = [pair for pair in pairs if not pair.control]
    claims = controls + _claims(others, lambda pair: trusted is True and (pair.place, pair.metric) in judged)
    return Judgement(
        trusted,
        tuple(tuple(claim for at, claim in claims if at == place) for place in range(len(run.outcomes))),
        tuple(
            tuple(_verdict(outcome, target, trusted, {metric.name for at, metric in judged if at == place}) for target in targets)
            for place, (outcome, targets) in enumerate((outcome, outcome.workload.targets) for outcome in run.outcomes)
        ),
    )


def compare(outcome: Outcome, metric: str, variant: str, baseline: str) -> Comparison:
    """The variant's runs beside the baseline's of the same rounds; a control's second runs beside its first ones."""
    ours = outcome.by_round(variant, metric, again=variant == baseline)
    theirs = outcome.by_round(baseline, metric)
    both = [number for number in ours if number in theirs]
    return statistics.compare([ours[number] for number in both], [theirs[number] for number in both])


def _pairs(place: int, outcome: Outcome) -> Iterator[_Pair]:
    workload = outcome.workload
    for metric in workload.metrics:
        wanted = [(outcome.control, outcome.control)]
        wanted += [(variant.name, workload.baseline) for variant in workload.variants if variant.name != workload.baseline]
        wanted += [(target.variant, target.relative_to) for target in workload.targets if target.metric == metric.name]
        for variant, baseline in dict.fromkeys(wanted):
            if variant and baseline:
                comparison = compare(outcome, metric.name, variant, baseline)
                if comparison.pairs:
                    yield _Pair(place, metric, variant, baseline, comparison)


def _claims(pairs: Sequence[_Pair], judged: Callable[[_Pair], bool]) -> list[tuple[int, Claim]]:
    """Each with its outcome's place; Holm's correction is over all of them that have a p-value."""
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
            (pair.place, Claim(pair.metric, pair.variant, pair.baseline, pair.control, pair.comparison, p, detectable, call))
        )
    return claims


def _call(pair: _Pair, p_corrected: float) -> Call:
    if pair.control:
        return "different" if p_corrected < CONTROL_LEVEL else "not shown"
    return "different" if p_corrected < statistics.LEVEL and not pair.comparison.may_be(1.0) else "not shown"


def _verdict(outcome: Outcome, target: Target, trusted: bool | None, controlled: Collection[str]) -> Verdict:
    """`controlled`: names of the outcome's metrics whose control was judged."""
    metric = next(metric for metric in outcome.workload.metrics if metric.name == target.metric)
    if target.relative_to is None:
        values = outcome.by_round(target.variant, metric.name)
        reached = median(values.values()) if values else None
        low = high = reached if len(values) >= statistics.FEWEST_PAIRS else None
    else:
        comparison = compare(outcome, metric.name, target.variant, target.relative_to)
        reached, low, high = comparison.ratio, comparison.low, comparison.high
    why_not = _why_not(outcome, reached, None if trusted and metric.name not in controlled else trusted)
    if why_not is None and low is not None and high is not None and low < target.bound < high:
        why_not = "its interval holds the bound"
    if why_not or low is None or high is None:
        return Verdict(target, reached, None, why_not or "too few rounds")
    return Verdict(target, reached, low >= target.bound if metric.better == "higher" else high <= target.bound)


def _why_not(outcome: Outcome, reached: float | None, trusted: bool | None) -> str | None:
    if reached is None:
        return "no measurement"
    if outcome.size == "quick":
        return "quick sizes"
    if trusted is None:
        return "no A/A control"
    return None if trusted else "the A/A control failed"
