"""What a run reports while it goes on: a line of `metrics.jsonl` and a progress bar at each log point."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class Times(NamedTuple):
    """Where the seconds between two log points went. `wait`, `dispatch` and `device` do not overlap.

    They are the host's, which runs ahead of the devices by up to two intervals: the first interval of a run looks
    shorter than its steps take, and the last one, which waits for all of them, longer.

    Attributes:
      steps: training steps.
      seconds: all of the time.
      wait: the loop waited for the feed.
      dispatch: the host started training steps; if too many are under way, JAX makes it wait here.
      device: the loop waited for results of the devices.
    """

    steps: int
    seconds: float
    wait: float
    dispatch: float
    device: float

    def since(self, before: Times) -> Times:
        return Times(
            self.steps - before.steps,
            self.seconds - before.seconds,
            self.wait - before.wait,
            self.dispatch - before.dispatch,
            self.device - before.device,
        )

    @property
    def rest(self) -> float:
        """Seconds of none of these: validation, and writing the log."""
        return max(0.0, self.seconds - self.wait - self.dispatch - self.device)


class Point(NamedTuple):
    """A log point: means over the training records since the one before, and accuracy on the validation set, if taken."""

    step: int
    loss: float
    accuracy: float
    val_accuracy: float | None
    times: Times

    def line(self) -> str:
        """As a line of JSON; accuracies and `input_wait` are shares from 0 to 1."""
        return json.dumps(
            {
                "step": self.step,
                "loss": self.loss,
                "accuracy": self.accuracy,
                "val_accuracy": self.val_accuracy,
                "steps_per_second": self.times.steps / self.times.seconds,
                "input_wait": self.times.wait / self.times.seconds,
            }
        )


class Log:
    """Keeps the points of a run, writes each to a file as it comes, and shows the last one. Use it in a `with`."""

    def __init__(self, path: Path, steps: int, quiet: bool):
        self.points: list[Point] = []
        self._file = path.open("w", encoding="utf-8", buffering=1)  # a line is in the file when it is written
        self._progress = _progress(quiet)
        self._task = self._progress.add_task("compile", total=steps, numbers="")

    def __enter__(self) -> Log:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._progress.stop()
        self._file.close()

    def write(self, point: Point) -> None:
        self._file.write(point.line() + "\n")
        self.points.append(point)
        times = point.times
        numbers = f"loss {point.loss:.3f}, accuracy {point.accuracy:.1%}, {times.steps / times.seconds:.0f} steps/s, "
        numbers += f"wait {times.wait / times.seconds:.1%}"
        self._progress.update(self._task, completed=point.step, description="train", numbers=numbers)


def _progress(quiet: bool) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    return Progress(*columns, console=Console(stderr=True), disable=quiet)
