"""Word the claims and verdicts of a run: one sentence each."""

from __future__ import annotations

from penstock_bench.model import Metric
from penstock_bench.number_format import number, times
from penstock_bench.outcome import Outcome, Run
from penstock_bench.verdict import CONTROL_LEVEL, Claim, Judgement, Verdict, fewest_rounds

_QUICK = "Quick sizes: these numbers show that all works, not how fast it is. The targets are for the full sizes."


_SCORED = "Scores are counted, not timed: they are the same in each run, so one run is enough and needs no A/A control."


def of_command(suite: str) -> str:
    """Return the words of the command after `penstock`, for a run's suite."""
    return suite if suite == "compare" else f"bench {suite}"


def trust(run: Run, judgement: Judgement) -> list[str]:
    """Say whether the report can be trusted: the result of the A/A controls, and which workloads are scored, not timed."""
    scored = [outcome.workload.scored for outcome in run.outcomes]
    timed = [] if scored and all(scored) else [_control_text(run, judgement)]
    return [*timed, *[_SCORED] * any(scored)]


def _control_text(run: Run, judgement: Judgement) -> str:
    """Say what the results of the A/A controls mean for the report."""
    controls = [claim for claims in judgement.claims for claim in claims if claim.control]
    if run.size == "quick":
        return _QUICK
    if judgement.trusted is None:
        fewest = sorted({fewest_rounds(outcome) for outcome in run.outcomes if not outcome.workload.scored})
        needs = " or ".join(map(str, fewest))
        return f"No A/A control could be judged (that takes {needs} rounds), so nothing is claimed."
    judged = [claim for claim in controls if claim.call != "not judged"]
    if judgement.trusted:
        unjudged = f"; {_count(len(controls) - len(judged), 'control')} not judged" if len(controls) > len(judged) else ""
        return (
            f"A/A control passed: {_count(len(judged), 'comparison')} of a variant with itself, in none of them a difference "
            f"beyond chance (the largest seen is {_percent(max(map(_apart, judged)))}){unjudged}."
        )
    failed = [claim for claim in judged if claim.call == "different"]
    return (
        "A/A CONTROL FAILED: this report claims nothing. "
        + "; ".join(
            f"{claim.variant} differs from itself in {claim.metric.name} by {_percent(_apart(claim))}" for claim in failed
        )
        + f" (corrected p < {CONTROL_LEVEL:g}). Something other than chance told two runs of the same thing apart: look for "
        "another load on the machine, and measure again."
    )


def claim_text(outcome: Outcome, claim: Claim) -> str:
    """Say how two variants differ, with the interval, the p-value and the smallest difference that could have been shown."""
    comparison, unit = claim.comparison, claim.metric.unit
    of_metric = f" ({claim.metric.name})" if len(outcome.workload.metrics) > 1 else ""
    if claim.control:
        who = f"A/A control, {claim.variant} beside itself{of_metric}: {times(comparison.ratio)}"
    else:
        verb = "has" if claim.metric.better == "higher" else "takes"
        who = f"{claim.variant} {verb} {times(comparison.ratio)} the {unit} of {claim.baseline}{of_metric}"
    rounds = outcome.rounds
    if comparison.pairs < rounds:  # in the other rounds, a number is missing or not positive
        who += f", in {comparison.pairs} of {rounds} rounds"
    if comparison.low is None or comparison.high is None:
        return f"{who}; {_count(comparison.pairs, 'round')}, and fewer than {fewest_rounds(outcome)} are not judged."
    who += f" (95 %: {times(comparison.low)} to {times(comparison.high)}; corrected p {_p(claim.p_corrected)})"
    seen = f"a difference of {_percent(claim.detectable or 1)} would have been shown in 8 of 10 such reports"
    if claim.call == "not judged":
        return f"{who}: not judged; {seen}."
    if claim.control:
        return f"{who}: {'no difference from chance' if claim.call == 'not shown' else 'FAILED, it differs from itself'}; {seen}."
    if claim.call == "not shown":
        return f"{who}: no difference shown; {seen}."
    return f"{who}: {_better(claim)}; {seen}."


def verdict_text(outcome: Outcome, verdict: Verdict) -> str:
    """Say what the target is and whether it was met."""
    target = verdict.target
    metric = outcome.workload.metric(target.metric)
    if outcome.workload.scored:
        return _scored_text(verdict, metric)
    words = "at least" if metric.better == "higher" else "at most"
    unit = f"× {target.relative_to}" if target.relative_to else f" {metric.unit}"
    which = f" ({metric.name})" if len(outcome.workload.metrics) > 1 else ""
    head = f"target: {target.variant}{which} {words} {target.bound:,g}{unit}: "
    if verdict.reached is None:
        return head + "not judged: no measurement"
    reached = times(verdict.reached) if target.relative_to else f"{number(verdict.reached)} {metric.unit}"
    if verdict.met is None:
        return head + ("not judged: quick sizes" if outcome.size == "quick" else f"{reached}, not judged: {verdict.why_not}")
    return head + f"{reached}, {'met' if verdict.met else 'NOT MET'}"


def _scored_text(verdict: Verdict, metric: Metric) -> str:
    """Say how many variants are within the bound of a target of a scored workload."""
    target = verdict.target
    whose = {
        "every": "every variant",
        "half": "at least half of the variants",
        "median": "the median of all",
        "total": "the total of all",
    }[target.over]
    words = {"higher": "at least", "lower": "at most", "zero": "an error of at most"}[metric.better]
    head = f"target: {metric.name}, {target.variant or whose}: {words} {target.bound:,g} {metric.unit}: "
    exempt = "".join(f"; not counted: {count}, {reason}" for reason, count in verdict.exempt.items())
    if verdict.met is None:
        return f"{head}not judged: {verdict.why_not}{exempt}"
    seen = [("total", verdict.reached)]
    if target.over != "total":
        seen = [("median", verdict.reached)] + [("worst", verdict.worst)] * (verdict.worst != verdict.reached)
    numbers = ", ".join(f"{name} {_plain(value)}" for name, value in seen if value is not None)
    met = "met" if verdict.met else "NOT MET"
    return f"{head}{verdict.within} of {verdict.counted}{numbers and f' ({numbers})'}, {met}{exempt}"


def _plain(value: float) -> str:
    """Return a number with at most four significant digits."""
    return f"{value:,.4g}"


def table_title(outcome: Outcome, metric: Metric) -> str:
    """Return the title of a metric's table."""
    workload = outcome.workload
    which = f", {metric.name}" if len(workload.metrics) > 1 else ""
    return f"{workload.fill(workload.title, outcome.size)}{which} ({metric.better} is better)"


def _better(claim: Claim) -> str:
    """Say which of two variants is better."""
    more = (claim.comparison.ratio or 1) > 1
    return f"{claim.variant if more == (claim.metric.better == 'higher') else claim.baseline} is better, beyond chance"


def _apart(claim: Claim) -> float:
    """Return the ratio or its inverse, whichever is > 1."""
    ratio = claim.comparison.ratio or 1.0
    return max(ratio, 1 / ratio)


def _percent(ratio: float) -> str:
    """Format the distance of a ratio > 1 from 1, in per cent."""
    return f"{(ratio - 1) * 100:.2g} %" if ratio < 1.995 else times(ratio)


def _p(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.2g}" if value >= 0.0001 else "< 0.0001"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
