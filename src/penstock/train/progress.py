"""The knowledge of a run beside its state: results of evaluations go in; what is best, and whether to stop early, comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.train.schedule import EarlyStop, Goal


@dataclass
class Progress:
    """The results of a run that are saved beside the state, and continued with.

    Attributes:
      evaluated: the step of the last evaluation.
      metrics: of the last evaluation.
      best_goal: the goal of the best checkpoint, as "min val_loss".
      best: its best value.
      stop_goal: the goal of the early stop.
      stop_best: its best value.
      stop_since: number of evaluations since then.
      stopped: whether the training has stopped early.
    """

    evaluated: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    best_goal: str | None = None
    best: float | None = None
    stop_goal: str | None = None
    stop_best: float | None = None
    stop_since: int = 0
    stopped: bool = False

    def add(self, step: int, metrics: Mapping[str, float], best: Goal | None, stop: EarlyStop | None) -> bool:
        """Add the result of an evaluation.

        Args:
          step: the step of the evaluation.
          metrics: its metrics.
          best: the goal of the best checkpoint.
          stop: when to stop early; sets `stopped`.

        Returns:
          Whether the checkpoint of this step would be the best.
        """
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
