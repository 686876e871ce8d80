"""Decide what the next round holds, and when to stop: by rounds, by minutes, or by how narrow the intervals are."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

from penstock_bench.model import Workload
from penstock_bench.outcome import Outcome, Run
from penstock_bench.repetition import LEAST_TURNS, that_fit
from penstock_bench.statistics import Comparison
from penstock_bench.verdict import fewest_rounds, judge

# An interval is narrow sooner where the scatter happens to look small. With fewer rounds before the first look, up to 8 % of
# intervals do not contain the true value. From ten on, it is at most 6.5 % (Student's, simulated with scatters of 0.6 to 3 % and
# ±1 %).
_PRECISE_ROUNDS = 10


@dataclass(frozen=True)
class Budget:
    """The conditions under which measuring stops.

    Attributes:
      rounds: the number of rounds of each timed workload; the minimum if `precision` is given.
      minutes: the time limit. A round is not started if it would probably end later.
      precision: continue until every interval is at most ± this share of its ratio; None for a fixed number of rounds.
      fills: `rounds` is a minimum, and rounds go on until the time is over, as a part of the plan.
    """

    rounds: int
    minutes: float
    precision: float | None
    fills: bool = False

    def rounds_of(self, workload: Workload) -> int:
        """Return the rounds of a workload, or the fewest. A scored one has the same numbers in each, so it gets one."""
        if workload.scored:
            return 1
        return max(self.rounds, _PRECISE_ROUNDS) if self.precision is not None and workload.live else self.rounds


def unfinished(run: Run, done: int, budget: Budget) -> list[str]:
    """Return the names of the workloads that should have another round."""
    outcomes = [outcome for outcome in run.outcomes if not outcome.pointless]
    if budget.fills:
        return [outcome.workload.name for outcome in outcomes if not outcome.workload.scored or done < 1]
    wanted = [outcome for outcome in outcomes if _rounds_done(outcome, done) < budget.rounds_of(outcome.workload)]
    if wanted or budget.precision is None:
        return [outcome.workload.name for outcome in wanted]
    return [
        outcome.workload.name
        for outcome, made in zip(run.outcomes, judge(run).claims, strict=True)
        if outcome in outcomes and any(_wider(claim.comparison, budget.precision) for claim in made if not claim.control)
    ]


def _rounds_done(outcome: Outcome, done: int) -> int:
    """Return the rounds that count. Those before live variants proved not to be able to live side by side do not."""
    latest = max((sample.round for sample in outcome.samples), default=-1)
    return outcome.rounds if outcome.alone and latest == done - 1 else done  # where the latest round gave nothing, none is added


def _wider(comparison: Comparison, precision: float) -> bool:
    """Tell whether an interval is wider than ± this share of its ratio."""
    low, high = comparison.low, comparison.high
    return low is None or high is None or math.sqrt(high / low) - 1 > precision


def that_fit_in_time(run: Run, wanted: Sequence[str], seconds: float) -> list[str]:
    """Return the workloads whose next round would probably end in time, the quick ones before the slow ones."""
    costs = {outcome.workload.name: _usual_round(outcome) for outcome in run.outcomes}
    # `sorted` is stable, so the first round keeps the given order: all estimates are 0 then.
    fitting = []
    for name in sorted(wanted, key=costs.__getitem__):
        seconds -= costs[name]
        if seconds > 0:
            fitting.append(name)
    return fitting


def turns(run: Run, names: Collection[str], done: int, budget: Budget, seconds: float) -> dict[str, int]:
    """Return the turns of the next round of each workload whose variants take turns.

    They are as many as `repetition.py` computes, or fewer, so that the rounds that are left end in time.

    Args:
      names: of the workloads in the next round.
      done: the number of rounds so far.
      seconds: the time that is left.
    """
    planned = [outcome for outcome in run.outcomes if outcome.workload.name in names and outcome.repetition is not None]
    others = sum(_usual_round(outcome) for outcome in run.outcomes if outcome.workload.name in names and outcome not in planned)
    left = max(1, budget.rounds - done)
    wanted = [outcome.repetition for outcome in planned if outcome.repetition is not None]
    counts = that_fit(wanted, left, seconds - left * others)
    return {outcome.workload.name: count for outcome, count in zip(planned, counts, strict=True)}


def miss_rounds(run: Run, names: Collection[str], budget: Budget) -> bool:
    """Tell whether one of the workloads of these names has fewer rounds than it should have."""
    asked = [outcome for outcome in run.outcomes if outcome.workload.name in names or outcome.alone]
    outcomes = [outcome for outcome in asked if not outcome.pointless]
    if budget.fills:
        return any(outcome.rounds < fewest_rounds(outcome) for outcome in outcomes)
    return any(outcome.rounds < budget.rounds_of(outcome.workload) for outcome in outcomes)


def _usual_round(outcome: Outcome) -> float:
    """Estimate the seconds of a round, the shortest one if variants take turns. 0 before the first round.

    The first round, which compiles, is ignored once there is another.
    """
    if (plan := outcome.repetition) is not None:
        return plan.starting + LEAST_TURNS * plan.turning
    rounds: dict[int, float] = {}
    for sample in outcome.samples:
        rounds[sample.round] = rounds.get(sample.round, 0.0) + sample.seconds
    later = [seconds for number, seconds in rounds.items() if number > 0]
    return median(later or rounds.values() or [0.0])


def too_late(run: Run, budget: Budget) -> str:
    """Word the reason of a run that the time limit ended early."""
    if budget.precision is not None:
        return f"its {budget.minutes:g} minutes ended before every interval was within ±{budget.precision * 100:g} %"
    # A workload without any variant that can run was not cut short.
    timed = [outcome for outcome in run.outcomes if not outcome.workload.scored]
    done = min((outcome.rounds for outcome in timed if outcome.rounds), default=0)
    if done == 0:
        advice = "allow more (--minutes), so that each variant can run at least once"
        return f"its {budget.minutes:g} minutes ended before one round; {advice}"
    advice = ""
    if any(outcome.rounds < fewest_rounds(outcome) for outcome in timed):
        needed = sum(fewest_rounds(outcome) * _usual_round(outcome) for outcome in timed) / 60
        advice = f"; to be judged, it needs about {1.2 * needed:.2g} minutes or more (--minutes)"
    of = "" if budget.fills else f" of {budget.rounds}"
    return f"its {budget.minutes:g} minutes ended after {done}{of} rounds{advice}"
