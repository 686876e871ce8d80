"""Compare the scores of a plan and the best baseline that keeps the limit, as numbers and text for the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from penstock_bench.model import Measurement, Remarks
from penstock_bench.suites.shard.scores import BaselineScore, Losses, OwnBaseline, PlanScore, Prediction, Score
from penstock_bench.suites.shard.task import Task

_BASELINES = "Layouts by hand: time and memory of a device"
_COLLECTIVES = "Collectives of the plans"


@dataclass(frozen=True)
class Comparison:
    """A plan beside the fastest baseline that keeps its limit.

    Attributes:
      best: None where no baseline keeps the limit.
      best_with_latency: the fastest one if each collective has a latency.
    """

    plan: PlanScore
    best: BaselineScore | None
    best_with_latency: BaselineScore | None

    @property
    def fits(self) -> bool:
        """Tell whether there is a plan and its program keeps the limit."""
        score, limit = self.plan.score, self.plan.limit_bytes
        return score is not None and limit is not None and score.memory <= limit

    @property
    def ratio(self) -> float | None:
        """Return the plan's time over the best baseline's, whether the plan keeps the limit or not; None without such a pair."""
        return self._ratio(self.best, "seconds")

    @property
    def ratio_with_latency(self) -> float | None:
        """Return the same if each collective has a latency."""
        return self._ratio(self.best_with_latency, "seconds_with_latency")

    def _ratio(self, best: BaselineScore | None, time: str) -> float | None:
        if self.plan.score is None or best is None:
            return None
        mine, by_hand = getattr(self.plan.score, time), getattr(best.score, time)
        return mine / by_hand if by_hand else (1.0 if mine == 0 else math.inf)

    @property
    def errors(self) -> dict[str, float]:
        """Return the errors of the planner's prediction; none without a plan."""
        score, predicted = self.plan.score, self.plan.predicted
        return {} if score is None or predicted is None else _errors(predicted, score)

    @property
    def outcome(self) -> str:
        """Say why a plan lost without regard to its time: there is no plan, or it is over its limit."""
        plan = self.plan
        if plan.score is None:
            return f"{'no plan' if plan.refused else 'failed'}: {plan.reason}"
        over = f"{plan.score.memory / plan.limit_bytes:.2f}× the limit" if plan.limit_bytes else "the limit is unknown"
        return over if self.ratio is None or self.best is None else f"{over}, {self.ratio:.3f}× {self.best.name}"


def _errors(predicted: Prediction, score: Score) -> dict[str, float]:
    """Return the errors of a prediction: bytes for the arguments, otherwise per cent of what was compiled."""
    return {
        "arguments": float(predicted.arguments - score.arguments),
        "peak memory": _per_cent(predicted.memory, score.memory),
        "bytes sent": _per_cent(predicted.bytes_on_wire, score.bytes_on_wire),
    }


def _per_cent(predicted: float, compiled: float) -> float:
    """Return the relative error of a prediction in per cent; infinite where the compiled number is 0 and the other is not."""
    if compiled == 0:
        return 0.0 if predicted == 0 else math.inf
    return 100 * (predicted / compiled - 1)


def compare(baselines: Sequence[BaselineScore], plan: PlanScore) -> Comparison:
    """Put a plan beside the best baseline within its limit."""
    return Comparison(plan, *(best_within(baselines, plan.limit_bytes, time) for time in ("seconds", "seconds_with_latency")))


def best_within(baselines: Sequence[BaselineScore], limit: int | None, time: str = "seconds") -> BaselineScore | None:
    """Return the fastest baseline that keeps a limit, by this field of its score; of several, the one that needs least memory."""
    scored = [(each, each.score) for each in baselines if each.score and _keeps(each.score, limit)]
    fitting = [(getattr(score, time), score.memory, each) for each, score in scored]
    return min(fitting, key=lambda entry: entry[:2])[2] if fitting else None


def _keeps(score: Score, limit: int | None) -> bool:
    return limit is None or score.memory <= limit


def measurements(
    task: Task, baselines: Sequence[BaselineScore], plans: Sequence[PlanScore], own: Sequence[OwnBaseline]
) -> dict[str, Measurement]:
    """Return the numbers of each plan of a task, by its limit, and of each baseline of the planner, by its name."""
    found = {plan.limit: plan_measurement(task, baselines, plan) for plan in plans}
    return found | {f"planner's {each.name}": own_measurement(task, each) for each in own}


def plan_measurement(task: Task, baselines: Sequence[BaselineScore], plan: PlanScore) -> Measurement:
    """Return the numbers of a plan, with all that the report says about them.

    A baseline that keeps the limit decides what counts. Where there is one, no plan or one over the limit has lost. Where there
    is none, neither the time nor the limit is judged.
    """
    found = compare(baselines, plan)
    values = dict(found.errors)
    if found.ratio is not None:
        values["time"] = found.ratio
    if found.ratio_with_latency is not None:
        values["time with latency"] = found.ratio_with_latency
    if plan.score is not None and plan.limit_bytes:
        values["memory"] = 100 * plan.score.memory / plan.limit_bytes
    if plan.planning is not None:
        values["planning"] = plan.planning
    if plan.gap is not None:
        values["proved gap"] = 100 * plan.gap
    values["refusals"] = float(plan.refused)
    values, missed = _finite(values)
    exempt = {}
    if found.best is None:
        alone = "only the plan fits" if found.fits else "nothing fits"
        over = plan.score is not None and not found.fits
        exempt = {"time": alone, "memory": "over the limit, which no baseline keeps either" if over else alone}
        exempt["refusals"] = "no baseline keeps the limit"
    elif not found.fits:
        missed |= {"time": found.outcome, "memory": found.outcome}
    return Measurement(
        values,
        {"task": asdict(task), "baselines": [asdict(each) for each in baselines], "plan": asdict(plan)},
        remarks=Remarks(
            _columns(found),
            _tables(task, baselines, plan),
            _notes(baselines, plan),
            missed,
            exempt,
            plan.reason if plan.score is None and not plan.refused else "",
        ),
    )


def own_measurement(task: Task, own: OwnBaseline) -> Measurement:
    """Return the errors of what the planner predicts for one of its own baselines."""
    values, missed = _finite(_errors(own.predicted, own.score))
    return Measurement(values, {"task": asdict(task), "own": asdict(own)}, remarks=Remarks(missed=missed))


def _finite(values: Mapping[str, float]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the finite numbers, and the reason why each of the others misses its targets."""
    infinite = [name for name, value in values.items() if not math.isfinite(value)]
    missed = dict.fromkeys(infinite, "infinitely many times as much")
    return {name: value for name, value in values.items() if name not in missed}, missed


def losses_measurement(task: Task, losses: Losses) -> Measurement:
    """Return the difference between the losses under a plan and on one device."""
    finite = math.isfinite(losses.difference)
    return Measurement(
        {"difference": losses.difference} if finite else {},
        {"task": asdict(task), "losses": asdict(losses)},
        remarks=Remarks(
            {"plan": losses.limit, "under the plan": _listed(losses.planned), "on one device": _listed(losses.alone)},
            notes=[losses.note] if losses.note else [],
            missed={} if finite else {"difference": "a loss is not finite"},
        ),
    )


def _columns(found: Comparison) -> dict[str, str]:
    """Return the cells beside a plan's numbers."""
    from penstock._bytes import format_bytes
    from penstock.shard.wording import format_seconds

    plan, ours, best = found.plan, found.plan.score, found.best.score if found.best else None
    return {
        "best by hand": found.best.name if found.best else "none fits",
        "plan's time": format_seconds(ours.seconds) if ours else "no plan" if plan.refused else "failed",
        "plan's memory": format_bytes(ours.memory) if ours else "–",
        "its time": format_seconds(best.seconds) if best else "–",
        "its memory": format_bytes(best.memory) if best else "–",
        "mesh": plan.mesh or "–",
        "planned and compiled in": format_seconds(plan.checking) if plan.checking is not None else "–",
    }


def _tables(task: Task, baselines: Sequence[BaselineScore], plan: PlanScore) -> Mapping[str, Sequence[Mapping[str, str]]]:
    """Return rows of every baseline, and of what the plan exchanges."""
    from penstock._bytes import format_bytes
    from penstock.shard.wording import format_seconds

    scores = {each.name: each.score for each in baselines}
    both = {
        name: f"{format_seconds(score.seconds)}, {format_bytes(score.memory)}" if score else "–" for name, score in scores.items()
    }
    tables = {_BASELINES: [{"model": task.model, "mesh": task.mesh, **both}]}
    if plan.score is not None:
        listed = ", ".join(plan.score.collectives) or "none"
        tables[_COLLECTIVES] = [{"plan": f"{task.name} {plan.limit}", "collectives": listed}]
    return tables


def _notes(baselines: Sequence[BaselineScore], plan: PlanScore) -> list[str]:
    """Return a sentence for everything that has no score, and for everything that a score leaves open."""
    notes = [f"no plan: {plan.reason}"] if plan.refused else []
    notes += [f"the plan: {sentence}" for sentence in (*plan.notes, *(plan.score.unknown if plan.score else ()))]
    for each in baselines:
        notes += [f"{each.name}: {each.reason}"] if each.score is None else []
        notes += [f"{each.name}: {sentence}" for sentence in (each.score.unknown if each.score else ())]
    return notes


def _listed(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.5g}" for loss in losses)
