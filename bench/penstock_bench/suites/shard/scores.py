"""Define the scores of baselines and plans for a model on a mesh. All numbers are of one device and one step."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """The cost of a compiled program.

    Attributes:
      seconds: FLOPs at the peak, and then the bytes of each collective over its link.
      memory: bytes: arguments + temporaries + outputs − what is aliased.
      arguments: bytes.
      bytes_on_wire: bytes sent.
      collectives: how often each kind runs over which mesh axes: "2 all-reduce over data".
      unknown: what the numbers other than memory leave open, a sentence each (`Measured.unknown`).
      seconds_with_latency: `seconds`, and the latency of each collective.
    """

    seconds: float
    memory: int
    arguments: int
    bytes_on_wire: float
    flops: float
    collectives: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    seconds_with_latency: float = 0.0


@dataclass(frozen=True)
class BaselineScore:
    """A layout that an expert would write by hand, or another planner's, with its score.

    Attributes:
      score: None where there is none.
      reason: why there is none.
    """

    name: str
    score: Score | None
    reason: str = ""


@dataclass(frozen=True)
class Prediction:
    """The bytes that the planner predicted."""

    arguments: int
    memory: int
    bytes_on_wire: float


@dataclass(frozen=True)
class OwnBaseline:
    """A baseline of the planner, which it prints beside its plan, as predicted and as compiled."""

    name: str
    predicted: Prediction
    score: Score


@dataclass(frozen=True)
class PlanScore:
    """The plan of penstock for one limit of memory, with its score.

    Attributes:
      limit: its name.
      limit_bytes: None where it is unknown, as data parallel did not compile.
      planning: seconds that it took to plan, without compilation.
      checking: seconds that it took to plan with the compiler that judges; None if no plan came out.
      mesh: the plan's mesh, in words.
      score: None where there is no plan, or it did not compile.
      predicted: None without a plan, and for a plan that is left to the compiler.
      reason: why there is no score.
      refused: the planner found that nothing fits; otherwise a missing score is an error.
      notes: the warnings of the planner.
      gap: the fraction by which a layout may be faster than the fastest that was found, by the estimate (`Plan.gap`); None if
        nothing is predicted to fit.
    """

    limit: str
    limit_bytes: int | None
    planning: float | None = None
    checking: float | None = None
    mesh: str = ""
    score: Score | None = None
    predicted: Prediction | None = None
    reason: str = ""
    refused: bool = False
    notes: tuple[str, ...] = ()
    gap: float | None = None


@dataclass(frozen=True)
class Losses:
    """The losses of some steps, on one device and under a plan.

    Attributes:
      limit: the limit of memory of the plan.
      note: what a reader must know: a smaller table, say.
    """

    alone: tuple[float, ...]
    planned: tuple[float, ...]
    limit: str
    note: str = ""

    @property
    def difference(self) -> float:
        """Return the largest relative difference between two losses of a step; infinite where a loss is not finite."""
        pairs = list(zip(self.alone, self.planned, strict=True))
        if not all(math.isfinite(loss) for pair in pairs for loss in pair):
            return math.inf
        return max(abs(a - b) / abs(a) if a else abs(b) for a, b in pairs)
