"""The log of a run: at each log point, a line of `metrics.jsonl` and an update of the progress bar."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

_SECONDS_BETWEEN_LINES = 5.0


class Times(NamedTuple):
    """The seconds between two log points, by activity of the host. `wait`, `dispatch`, `device` and `validation` do not overlap.

    The host runs ahead of the devices by up to two intervals. So the first interval of a run looks shorter than its steps take.
    The last interval looks longer, because it waits for all steps.

    Attributes:
      steps: number of training steps.
      seconds: total time.
      wait: the loop waited for the feed.
      dispatch: the host dispatched training steps. JAX waits here if too many steps are in flight.
      device: the loop waited for results of the devices.
      validation: the host ran the validation, and at the end waited for its result.
    """

    steps: int
    seconds: float
    wait: float
    dispatch: float
    device: float
    validation: float

    def since(self, before: Times) -> Times:
        """Return the difference to earlier readings of the clock."""
        return Times(self.steps - before.steps, *(now - then for now, then in zip(self[1:], before[1:], strict=True)))

    @property
    def steps_per_second(self) -> float:
        """Return the training steps per second, without the time of the validation."""
        return self.steps / (self.seconds - self.validation)

    @property
    def rest(self) -> float:
        """Return the seconds that were not spent on training: validation, and writing the log."""
        return max(0.0, self.seconds - self.wait - self.dispatch - self.device)


class Point(NamedTuple):
    """A log point: means over the training records since the log point before, and the validation accuracy if measured."""

    step: int
    loss: float
    accuracy: float
    val_accuracy: float | None
    times: Times

    def line(self) -> str:
        """Return a line of JSON. Accuracies and `input_wait` are shares from 0 to 1; the speed leaves out the validation."""
        return json.dumps(
            {
                "step": self.step,
                "loss": self.loss,
                "accuracy": self.accuracy,
                "val_accuracy": self.val_accuracy,
                "steps_per_second": self.times.steps_per_second,
                "input_wait": self.times.wait / self.times.seconds,
            }
        )


class Log:
    """The log points of a run, which are written to a file one by one, and the display of its progress. Use it in a `with`.

    On a terminal it shows a progress bar, elsewhere a line every few seconds. The first point creates the file.
    """

    def __init__(self, path: Path, steps: int, quiet: bool):
        self.points: list[Point] = []
        self._path, self._steps = path, steps
        self._file: TextIO | None = None
        console = Console(stderr=True)
        self._lines = not quiet and not console.is_terminal
        self._next_line = 0.0
        self._progress = _progress(console, disable=quiet or self._lines)
        self._task = self._progress.add_task("compile", total=steps, numbers="")

    def __enter__(self) -> Log:
        self._progress.start()
        self._progress.console.show_cursor()  # the bar hides it, and a killed process would leave it hidden
        if self._lines:
            print("compile", file=sys.stderr, flush=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._progress.stop()
        if self._file:
            self._file.close()

    def write(self, point: Point) -> None:
        """Add a point: write it to the file and show it."""
        self._file = self._file or self._path.open(
            "w", encoding="utf-8", buffering=1
        )  # line-buffered: each line is in the file at once
        self._file.write(point.line() + "\n")
        self.points.append(point)
        last = point.step == self._steps
        numbers = _numbers(point, self._mean() if last else point.times)
        self._progress.update(self._task, completed=point.step, description="train", numbers=numbers)
        if self._lines and (last or time.monotonic() >= self._next_line):
            print(f"train {point.step}/{self._steps} {numbers}", file=sys.stderr, flush=True)
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES

    def _mean(self) -> Times:
        """Return the sums over the run: the last interval alone waits for the steps of two."""
        return Times(*map(sum, zip(*(point.times for point in self.points), strict=True)))


def _numbers(point: Point, times: Times) -> str:
    speed, wait = f"{times.steps_per_second:.0f} steps/s", f"wait {times.wait / times.seconds:.1%}"
    return f"loss {point.loss:.3f}, accuracy {point.accuracy:.1%}, {speed}, {wait}"


def _progress(console: Console, disable: bool) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    return Progress(*columns, console=console, disable=disable)
