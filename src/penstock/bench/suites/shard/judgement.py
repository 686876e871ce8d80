"""What the scores say: each plan against the best layout by hand that fits, and all of them against the targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from penstock.bench.suites.shard.case import Attempt, Case, Planned

# To three decimals, as it is printed: a plan that is the baseline sends what it sends, but for sums of single numbers, of which
# there may be some more or fewer (of 30 parts in a million).
_SAME = 5e-4
_BETTER, _AT_LEAST = 0.9, 0.5
_MEMORY_ERROR, _WIRE_ERROR = 0.2, 0.25
_PLANNING = 10.0  # seconds
_LOSSES = 1e-4


@dataclass(frozen=True)
class Cell:
    """A model on a mesh within a limit of memory.

    Attributes:
      best: the fastest baseline that keeps the limit; None where none does.
    """

    case: Case
    plan: Planned
    best: Attempt | None

    @property
    def name(self) -> str:
        return f"{self.case.model} on {self.case.mesh}, {self.plan.limit}"

    @property
    def fits(self) -> bool:
        """Whether there is a plan and its program keeps the limit."""
        score, limit = self.plan.score, self.plan.limit_bytes
        return score is not None and limit is not None and score.memory <= limit

    @property
    def ratio(self) -> float | None:
        """The plan's time over the best baseline's, whether the plan keeps the limit or not; None where there is no such pair."""
        score, best = self.plan.score, self.best.score if self.best else None
        if score is None or best is None:
            return None
        return score.seconds / best.seconds if best.seconds else (1.0 if score.seconds == 0 else math.inf)

    @property
    def won(self) -> bool:
        """No baseline that keeps the limit is faster than a plan that keeps it."""
        return self.best is None or (self.fits and self.ratio is not None and self.ratio <= 1 + _SAME)

    @property
    def arguments_error(self) -> int | None:
        """Bytes: predicted − compiled."""
        score, predicted = self.plan.score, self.plan.predicted
        return None if score is None or predicted is None else predicted.arguments - score.arguments

    @property
    def memory_error(self) -> float | None:
        """Predicted over compiled, less 1."""
        score, predicted = self.plan.score, self.plan.predicted
        return None if score is None or predicted is None else _error(predicted.memory, score.memory)

    @property
    def wire_error(self) -> float | None:
        """Predicted over compiled, less 1."""
        score, predicted = self.plan.score, self.plan.predicted
        return None if score is None or predicted is None else _error(predicted.wire, score.wire)


def _error(predicted: float, found: float) -> float:
    if found == 0:
        return 0.0 if predicted == 0 else math.inf
    return predicted / found - 1


def cells_of(case: Case) -> list[Cell]:
    """One for each limit."""
    return [Cell(case, plan, best_within(case.baselines, plan.limit_bytes)) for plan in case.plans]


def best_within(baselines: Sequence[Attempt], limit: int | None) -> Attempt | None:
    """The fastest that keeps a limit; of several, the one that needs least memory."""
    fitting = [(each.score.seconds, each.score.memory, each) for each in baselines if _keeps(each, limit) and each.score]
    return min(fitting, key=lambda entry: entry[:2])[2] if fitting else None


def _keeps(attempt: Attempt, limit: int | None) -> bool:
    return attempt.score is not None and (limit is None or attempt.score.memory <= limit)


@dataclass(frozen=True)
class Verdict:
    """What became of a target.

    Attributes:
      met: None where nothing was there to judge.
      reached: in words.
      misses: the cells that missed it, with what they reached, the worst first.
    """

    target: str
    met: bool | None
    reached: str
    misses: tuple[str, ...] = ()


def judge(cases: Sequence[Case]) -> list[Verdict]:
    """Hold what was found against the targets. A case that failed counts against the first."""
    cells = [cell for case in cases for cell in cells_of(case)]
    failed = [f"{case.model} on {case.mesh}: {case.failure}" for case in cases if case.failure]
    return [
        _never_slower(cells, failed),
        _often_faster(cells),
        _limits_kept(cells),
        _every(cells, "predicted bytes of arguments are exact", lambda cell: cell.arguments_error, 0, "{:+,d} bytes"),
        _median(cells, "peak memory", _MEMORY_ERROR, lambda cell: cell.memory_error),
        _median(cells, "bytes sent", _WIRE_ERROR, lambda cell: cell.wire_error),
        _every(cells, f"at most {_PLANNING:g} s to plan", lambda cell: cell.plan.planning, _PLANNING, "{:.1f} s"),
        _losses(cases),
    ]


def _never_slower(cells: Sequence[Cell], failed: Sequence[str]) -> Verdict:
    compared = [cell for cell in cells if cell.best]
    slower = sorted((cell for cell in compared if not cell.won), key=lambda cell: -(cell.ratio or math.inf))
    misses = (*failed, *(f"{cell.name}: {_outcome(cell)}" for cell in slower))
    only = sum(cell.best is None and cell.fits for cell in cells)
    neither = sum(cell.best is None and not cell.fits for cell in cells)
    reached = f"{len(compared) - len(slower)} of {len(compared)} cells"
    reached += f"; only the plan fits in {only} more" if only else ""
    reached += f"; nothing fits in {neither} more" if neither else ""
    target = "time at most that of the best baseline that fits, in every cell"
    return Verdict(target, _met(compared or failed, misses), reached, misses)


def _often_faster(cells: Sequence[Cell]) -> Verdict:
    compared = [cell for cell in cells if cell.best]
    faster = [cell for cell in compared if cell.fits and cell.ratio is not None and cell.ratio <= _BETTER]
    met = len(faster) >= _AT_LEAST * len(compared) if compared else None
    ratios = [cell.ratio for cell in compared if cell.fits and cell.ratio is not None]
    middle = f", median {median(ratios):.3f}×" if ratios else ""
    return Verdict(
        f"time at most {_BETTER:g}× that of the best baseline, in at least half of the cells",
        met,
        f"{len(faster)} of {len(compared)}{middle}",
    )


def _limits_kept(cells: Sequence[Cell]) -> Verdict:
    possible = [cell for cell in cells if cell.best]
    misses = tuple(f"{cell.name}: {_outcome(cell)}" for cell in possible if not cell.fits)
    kept = f"{len(possible) - len(misses)} of {len(possible)} cells"
    # Not what the target asks for, and yet a promise that was not kept: the planner refuses where it finds that nothing fits.
    broken = sum(cell.best is None and cell.plan.score is not None and not cell.fits for cell in cells)
    kept += f"; over it in {broken} more, where no baseline keeps it either" if broken else ""
    return Verdict("the limit is kept wherever a baseline keeps it", _met(possible, misses), kept, misses)


def _outcome(cell: Cell) -> str:
    """What a cell came to, in a few words."""
    plan = cell.plan
    if plan.score is None:
        return f"{'no plan' if plan.refused else 'failed'}: {plan.reason}"
    over = "" if cell.fits or plan.limit_bytes is None else f"{plan.score.memory / plan.limit_bytes:.2f}× the limit, "
    if cell.ratio is None or cell.best is None:
        return over + "no baseline fits"
    return f"{over}{cell.ratio:.3f}× {cell.best.name}"


def _every(cells: Sequence[Cell], target: str, value: Callable[[Cell], float | None], most: float, form: str) -> Verdict:
    known = [(abs(found), found, cell) for cell in cells if (found := value(cell)) is not None]
    worse = sorted((entry for entry in known if entry[0] > most), key=lambda entry: -entry[0])
    misses = tuple(f"{cell.name}: {form.format(found)}" for _, found, cell in worse)
    return Verdict(target, _met(known, misses), f"{len(known) - len(misses)} of {len(known)} cells", misses)


def _median(cells: Sequence[Cell], what: str, most: float, error: Callable[[Cell], float | None]) -> Verdict:
    errors = sorted(((abs(found), found, cell) for cell in cells if (found := error(cell)) is not None), key=lambda e: -e[0])
    target = f"median error of the predicted {what} at most {most:.0%}"
    if not errors:
        return Verdict(target, None, "nothing to judge")
    middle = median(size for size, _, _ in errors)
    beyond = tuple(f"{cell.name}: {found:+.0%}" for size, found, cell in errors if size > most)
    return Verdict(target, middle <= most, f"{middle:.1%}", beyond)


def _losses(cases: Sequence[Case]) -> Verdict:
    trained = [(case, case.training) for case in cases if case.training]
    misses = []
    for case, training in trained:
        difference = training.difference
        if training.reason or difference is None or not difference <= _LOSSES:  # NaN is not
            misses.append(f"{case.model} on {case.mesh}: {training.reason or f'{difference:.1e}'}")
    reached = f"{len(trained) - len(misses)} of {len(trained)} trained" if trained else "not trained"
    differences = [training.difference for _, training in trained if training.difference is not None]
    reached += f", the largest difference {max(differences):.1e}" if differences else ""
    target = f"losses under the plan within {_LOSSES:g} of those of one device"
    return Verdict(target, _met(trained, misses), reached, tuple(misses))


def _met(judged: Sequence[object], misses: Sequence[str]) -> bool | None:
    return not misses if judged else None
