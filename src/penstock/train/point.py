"""`Point`: what a logger of `ps.fit` is called with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.train.goodput import Goodput


@dataclass(frozen=True)
class Point:
    """An event of a run, for loggers.

    Attributes:
      kind: "begin" is the first point. "train" has the metrics of the steps since the train point before, and is given one
        interval late. "evaluation" has those of an evaluation. "message" has a text. "end" is the last point, also after an
        error.
      step: number of steps done; of "begin" the step from which the run continues.
      steps: number of steps of the run; None if it ends with its feed.
      metrics: name → value. Those of an evaluation have names that begin with "val_".
      speed: of "train", steps per second, without the time of evaluations and saves.
      input_wait: of "train", the share of the time, 0 to 1, for which the devices starved for the next batch.
      text: of "message" and "end", a sentence.
      goodput: of "end", where the time of the run went.
    """

    kind: Literal["begin", "train", "evaluation", "message", "end"]
    step: int
    steps: int | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    speed: float | None = None
    input_wait: float | None = None
    text: str = ""
    goodput: Goodput | None = None


Logger = Callable[[Point], None]
