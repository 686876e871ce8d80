"""Decide when a run logs, evaluates and saves, which of its results is best, and when it stops early."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock._arguments import at_least


@dataclass(frozen=True)
class Evaluation:
    """An evaluation on a second feed: what to compute, on which batches, and how often.

    Attributes:
      step: a function (state, batch) → dict of scalars or `ps.Mean`s. It is jitted, and does not change the state.
      batches: a function without arguments that returns the batches of one evaluation, on the devices: usually a new `ps.feed`.
        Or a Loader, or another iterable that can be read again, which is fed to the devices as the training batches are.
      every: number of training steps between two evaluations. There is one after the last step too.

    Raises:
      TypeError: `step` is not a function, or there are no batches.
      ValueError: `every` is not an integer >= 1.

    Examples:
      >>> def accuracy(state, batch):
      ...     return {"accuracy": ps.Mean((batch["x"] > state).sum(), batch["x"].size)}
      >>> evaluation = ps.Evaluation(accuracy, ps.Loader({"x": np.arange(8.0)}, batch_size=4, epochs=1), every=100)
    """

    step: Callable[[Any, Any], Mapping[str, Any]]
    batches: Any
    every: int

    def __post_init__(self) -> None:
        if not callable(self.step):
            raise TypeError(f"step={self.step!r} of an Evaluation is not a function from (state, batch) to metrics")
        if not callable(self.batches) and not hasattr(self.batches, "__iter__") and not hasattr(self.batches, "__getitem__"):
            raise TypeError(f"batches={self.batches!r} of an Evaluation: needs a Loader, a feed, or a function that opens one")
        at_least(1, "every", self.every)


@dataclass(frozen=True)
class Goal:
    """A metric and the direction in which it is better, as "min val_loss" says."""

    direction: Literal["min", "max"]
    metric: str

    @classmethod
    def parse(cls, text: str, argument: str) -> Goal:
        """Read "min NAME" or "max NAME"; raise ValueError if the text is neither."""
        direction, _, metric = text.partition(" ") if isinstance(text, str) else ("", "", "")
        if direction not in ("min", "max") or not metric.strip():
            raise ValueError(f"{argument}={text!r}: needs 'min' or 'max' and the name of a metric, such as 'min val_loss'")
        return cls(direction, metric.strip())  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.direction} {self.metric}"

    def better(self, value: float, other: float, by: float = 0.0) -> bool:
        """Return whether a value is better than another one, by more than `by`. NaN is worse than all."""
        if math.isnan(value) or math.isnan(other):
            return math.isnan(other) and not math.isnan(value)
        return value < other - by if self.direction == "min" else value > other + by


@dataclass(frozen=True)
class EarlyStop:
    """End a training when a metric of the evaluation does not get better any more.

    Attributes:
      goal: "min NAME" or "max NAME".
      patience: number of evaluations in a row without an improvement after which the training ends.
      by: an improvement is larger than this.

    Raises:
      ValueError: an argument is invalid.

    Examples:
      >>> stop = ps.EarlyStop("min val_loss", patience=3)
    """

    goal: str
    patience: int = 3
    by: float = 0.0

    def __post_init__(self) -> None:
        Goal.parse(self.goal, "goal")
        at_least(1, "patience", self.patience)
        if isinstance(self.by, bool) or not isinstance(self.by, (int, float)) or not self.by >= 0:
            raise ValueError(f"by={self.by!r}: needs a number >= 0")


@dataclass(frozen=True)
class Schedule:
    """The numbers of steps between two log points, evaluations and checkpoints; None for never."""

    steps: int | None  # of the run; None for the length of the feed
    log: int
    evaluate: int | None
    save: int | None
    profile: tuple[int, int] | None  # the first and the last step of a trace, from 0; None for none

    def is_due(self, every: int | None, step: int) -> bool:
        """Return whether an event of every so many steps is due after `step` steps. It always is after the last step."""
        return every is not None and (step % every == 0 or step == self.steps)


@dataclass
class Progress:
    """The results of evaluations, which are saved beside the state."""

    evaluated: int = 0  # the step of the last evaluation
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    best_goal: str | None = None  # the goal of the best checkpoint, as "min val_loss"
    best: float | None = None  # the best value of that goal
    stop_goal: str | None = None  # the goal of the early stop
    stop_best: float | None = None  # the best value of that goal
    stop_since: int = 0  # number of evaluations since then
    stopped: bool = False  # whether the training has stopped early

    def add(self, step: int, metrics: Mapping[str, float], best: Goal | None, stop: EarlyStop | None) -> bool:
        """Add the result of an evaluation, set `stopped`, and return whether the checkpoint of this step would be the best."""
        self.evaluated, self.metrics = step, dict(metrics)
        if stop:
            goal = Goal.parse(stop.goal, "goal")
            value = metrics[goal.metric]
            if self.stop_goal != stop.goal:  # it was another one before a restart
                self.stop_goal, self.stop_best, self.stop_since = stop.goal, None, 0
            if self.stop_best is None or goal.better(value, self.stop_best, stop.by):
                self.stop_best, self.stop_since = value, 0
            else:
                self.stop_since += 1
            self.stopped = self.stop_since >= stop.patience
        if best and self.best_goal != str(best):
            self.best_goal, self.best = str(best), None
        if best and (self.best is None or best.better(metrics[best.metric], self.best)):
            self.best = metrics[best.metric]
            return True
        return False

    def metric(self, step: int, best: Goal | None) -> float | None:
        """Return the value of the goal at a step; None if there was no evaluation at that step."""
        return self.metrics.get(best.metric) if best and self.evaluated == step else None
