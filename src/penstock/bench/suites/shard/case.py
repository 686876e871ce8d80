"""What was found of a model on a mesh. All numbers are of one device and one step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Score:
    """What the compiled program costs.

    Attributes:
      seconds: FLOPs at the peak, and then the bytes of each collective over its link.
      memory: bytes: arguments + temporaries + outputs − what is aliased.
      arguments: bytes.
      wire: bytes sent.
      collectives: how often each kind runs over which mesh axes: "2 all-reduce over data".
      unknown: what the numbers other than memory leave open, a sentence each (`Measured.unknown`).
    """

    seconds: float
    memory: int
    arguments: int
    wire: float
    flops: float
    collectives: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Attempt:
    """A layout that an expert would write by hand, or another planner's.

    Attributes:
      score: None where there is none.
      reason: why there is none.
    """

    name: str
    score: Score | None
    reason: str = ""


@dataclass(frozen=True)
class Prediction:
    """What the planner said: bytes."""

    arguments: int
    memory: int
    wire: float


@dataclass(frozen=True)
class Planned:
    """What penstock made of it, for one limit of memory.

    Attributes:
      limit: its name.
      limit_bytes: None where nobody knows it, as data parallel did not compile.
      planning: seconds that it took to plan.
      score: None where there is no plan, or it did not compile.
      reason: why there is no score.
      refused: the planner found that nothing fits; otherwise a missing score is an error.
    """

    limit: str
    limit_bytes: int | None
    planning: float | None = None
    score: Score | None = None
    predicted: Prediction | None = None
    reason: str = ""
    refused: bool = False


@dataclass(frozen=True)
class Training:
    """Some steps, on one device and under a plan.

    Attributes:
      alone, planned: the losses.
      limit: of the plan.
      note: what a reader must know: a smaller table, say.
      reason: why there are no losses.
    """

    alone: tuple[float, ...] = ()
    planned: tuple[float, ...] = ()
    limit: str = ""
    note: str = ""
    reason: str = ""

    @property
    def difference(self) -> float | None:
        """The largest relative one between two losses of a step; infinite where a loss is not finite."""
        pairs = list(zip(self.alone, self.planned, strict=True))
        if not all(math.isfinite(loss) for pair in pairs for loss in pair):
            return math.inf
        return max((abs(a - b) / abs(a) if a else abs(b) for a, b in pairs), default=None)


@dataclass(frozen=True)
class Case:
    """A model on a mesh.

    Attributes:
      baselines: do not depend on the limit.
      plans: one for each limit.
      training: None where nobody asked.
      failure: why there is nothing at all.
      seconds: that it took to find all this.
    """

    model: str
    mesh: str
    baselines: tuple[Attempt, ...] = ()
    plans: tuple[Planned, ...] = ()
    training: Training | None = None
    failure: str = ""
    seconds: float = 0.0


def case_from_json(read: Mapping[str, Any]) -> Case:
    """What `dataclasses.asdict` made of a case, by way of JSON."""
    return Case(
        model=read["model"],
        mesh=read["mesh"],
        baselines=tuple(Attempt(**{**each, "score": _score(each["score"])}) for each in read["baselines"]),
        plans=tuple(
            Planned(
                **{
                    **each,
                    "score": _score(each["score"]),
                    "predicted": each["predicted"] and Prediction(**each["predicted"]),
                }
            )
            for each in read["plans"]
        ),
        training=training_from_json(read["training"]) if read["training"] else None,
        failure=read["failure"],
        seconds=read["seconds"],
    )


def training_from_json(read: Mapping[str, Any]) -> Training:
    return Training(**{**read, "alone": tuple(read["alone"]), "planned": tuple(read["planned"])})


def _score(read: Mapping[str, Any] | None) -> Score | None:
    return Score(**{**read, "collectives": tuple(read["collectives"]), "unknown": tuple(read["unknown"])}) if read else None
