"""Make loggers for `ps.fit(log=[...])`; the module is also `ps.log`.

A logger is any function of a `Point`. It is called with every point of the run, in process 0 only, on the thread of the loop
between two steps: it should be quick. After a restart the "begin" point has the step from which the run continues, and the points
after that step are logged again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from penstock._arguments import check_path
from penstock._atomic_write import replace
from penstock.train.metrics import Logger, Point, numbers

_SECONDS_BETWEEN_LINES = 5.0
_BAR = 10  # characters


def jsonl(path: str | os.PathLike[str]) -> Logger:
    """Return a logger that writes a line of JSON for each train and evaluation point.

    A line has "step" and the metrics; of a train point also "steps_per_second" and "input_wait". Values that are not finite are
    null. When a run continues, lines after the step from which it continues are dropped, as they come again. So but for the
    speeds, a run that was stopped leaves the same file as one that was not.

    Args:
      path: the file. Its folder is made if necessary.

    Examples:
      >>> log = ps.log.jsonl("runs/a/metrics.jsonl")
    """
    return _Jsonl(check_path("path", path))


def progress(*, summary: bool = True) -> Logger:
    """Return a logger that shows a progress bar on a terminal, and elsewhere prints a line every few seconds, to stderr.

    Args:
      summary: whether to print at the end where the time went, and whether the feed kept up.
    """
    return _Progress(summary)


def tensorboard(folder: str | os.PathLike[str]) -> Logger:
    """Return a logger that writes scalars for TensorBoard. It needs: pip install "penstock[log]"

    Args:
      folder: gets the event files.

    Raises:
      ImportError: tensorboardX is not installed.
    """
    try:
        import tensorboardX
    except ImportError as error:
        raise ImportError("ps.log.tensorboard needs: pip install tensorboardX") from error
    return _TensorBoard(check_path("folder", folder), tensorboardX.SummaryWriter)


def wandb(**settings: Any) -> Logger:
    """Return a logger for Weights & Biases. It needs: pip install "penstock[log]"

    Args:
      **settings: arguments of `wandb.init`, such as project, name, mode="offline". With `id` and resume="allow", an attempt
        after a restart goes on with the same run.

    Raises:
      ImportError: wandb is not installed.
    """
    try:
        import wandb as library
    except ImportError as error:
        raise ImportError("ps.log.wandb needs: pip install wandb") from error
    return _Wandb(library, settings)


class _Jsonl:
    def __init__(self, path: Path):
        self._path = path
        self._file: TextIO | None = None
        self._until: dict[str, float] = {}  # the step of the last line of each kind that was there at the begin

    def __call__(self, point: Point) -> None:
        if point.kind == "begin":
            self._drop_after(point.step)
        elif point.step <= self._until.get(point.kind, -1):
            pass  # it was logged before the stop, and not yet when the run was saved
        elif point.kind in ("train", "evaluation"):
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", encoding="utf-8", buffering=1)  # each line is in the file at once
            values = {name: value if abs(value) < float("inf") else None for name, value in numbers(point).items()}
            step = {"step": point.step}  # also if there is a metric of this name
            self._file.write(json.dumps(step | values | step) + "\n")
        elif point.kind == "end" and self._file is not None:
            self._file.close()
            self._file = None

    def _drop_after(self, step: int) -> None:
        """Drop the lines of later steps, and a last line that was not finished when the process was killed."""
        self._until = {}
        try:
            lines = self._path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return
        read = [(line, *_kind_and_step(line)) for line in lines if line.endswith(b"\n")]
        kept = [each for each in read if each[2] <= step]
        if len(kept) < len(lines):
            replace(self._path, b"".join(line for line, _, _ in kept).decode("utf-8"))
        self._until = {kind: last for _, kind, last in kept}


def _kind_and_step(line: bytes) -> tuple[str, float]:
    """Return the kind of point that a line describes, and its step; an unreadable line has an infinite step."""
    try:
        values = json.loads(line.decode("utf-8"))
        step = float(values["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "", float("inf")
    # A train point has its speed besides its metrics, one of which may be called val_….
    return "evaluation" if all(name.startswith("val_") for name in values if name != "step") else "train", step


class _Progress:
    """A progress bar or lines. It has no `with`: the "end" point ends it, which comes after errors too."""

    def __init__(self, summary: bool):
        self._summary = summary
        self._bar: Any = None
        self._newest: dict[str, Point] = {}  # by kind
        self._lines = self._has_more = False
        self._next_line = self._start = 0.0

    def __call__(self, point: Point) -> None:
        if point.kind == "begin":
            self._begin(point)
        elif point.kind == "end":
            self._end(point)
        else:
            self._newest[point.kind] = point
            self._show()

    def _begin(self, point: Point) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = Console(stderr=True)
        self._newest, self._has_more, self._start = {}, False, time.monotonic()
        self._lines = not console.is_terminal
        if self._lines:
            start = f" (continued from step {point.step:,})" if point.step else ""
            print(f"compile{start}", file=sys.stderr, flush=True)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=_BAR),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
        )
        self._bar = Progress(*columns, console=console)
        self._task = self._bar.add_task("compile", total=point.steps, completed=point.step, numbers="")
        self._bar.start()
        console.show_cursor()  # the bar hides it, and a killed process would leave it hidden

    def _show(self) -> None:
        if self._bar:
            self._show_bar()
        elif self._lines:
            self._has_more = True
            if time.monotonic() >= self._next_line:
                self._print_line()

    def _print_line(self) -> None:
        step, steps = self._position()
        numbers = ", ".join([*self._metrics(step).values(), *self._rates()])
        print(f"train {step}/{steps or '?'} {numbers}", file=sys.stderr, flush=True)
        self._has_more, self._next_line = False, time.monotonic() + _SECONDS_BETWEEN_LINES

    def _show_bar(self) -> None:
        """Show the bar, the step, and as many numbers as there is room for: first the loss, the speed and the time left."""
        step, steps = self._position()
        metrics = self._metrics(step)
        loss = metrics.pop("loss", "") or (metrics.pop(next(iter(metrics))) if metrics else "")
        speed, *wait = self._rates() or [""]
        elapsed = f"{_duration(time.monotonic() - self._start)} elapsed"
        texts = list(filter(None, [loss, speed, self._time_left(step, steps), *metrics.values(), *wait, elapsed]))
        room = self._bar.console.width - len(f"train {'━' * _BAR} {step}/{steps or '?'} ")
        fit = [number for number in range(len(texts) + 1) if len(", ".join(texts[:number])) <= room]
        self._bar.update(self._task, completed=step, description="train", numbers=", ".join(texts[: max(fit, default=0)]))
        self._has_more = max(fit, default=0) < len(texts) - 1  # the end shows them

    def _position(self) -> tuple[int, int | None]:
        """Return the newest step of which something is known, and the number of steps of the run."""
        newest = max(self._newest.values(), key=lambda point: point.step)
        return newest.step, newest.steps

    def _metrics(self, step: int) -> dict[str, str]:
        """Return the text of each metric by name, of training first. A metric of an earlier step says so."""
        texts: dict[str, str] = {}
        for kind in ("train", "evaluation"):
            if point := self._newest.get(kind):
                earlier = "" if point.step == step else f" (step {point.step})"
                texts |= {name: f"{name} {value:.3g}{earlier}" for name, value in point.metrics.items()}
        return texts

    def _rates(self) -> list[str]:
        point = self._newest.get("train")
        if point is None or point.speed is None or point.input_wait is None:
            return []
        return [f"{point.speed:.3g} steps/s", f"input wait {point.input_wait:.1%}"]

    def _time_left(self, step: int, steps: int | None) -> str:
        point = self._newest.get("train")
        return f"{_duration((steps - step) / point.speed)} left" if steps and point and point.speed and step < steps else ""

    def _end(self, point: Point) -> None:
        """Stop the bar or print the last line, and say where the time went if the run ended without an error."""
        if self._bar:
            self._bar.stop()
            self._bar = None
        if self._has_more:
            self._print_line()
        if self._summary and point.text:
            goodput = [f"goodput: {point.goodput}"] if point.goodput else []
            print(*goodput, point.text, sep="\n", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    """Return a duration as minutes and seconds, and hours if there are any.

    >>> _duration(63.4), _duration(3723.4)
    ('1:03', '1:02:03')
    """
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}" if minutes >= 60 else f"{minutes}:{second:02}"


class _TensorBoard:
    def __init__(self, folder: Path, writer: Any):
        self._folder, self._make = folder, writer
        self._writer: Any = None

    def __call__(self, point: Point) -> None:
        if point.kind == "begin":
            # The suffix keeps the files of two attempts of the same second apart.
            purge = point.step + 1 if point.step else None
            self._writer = self._make(str(self._folder), purge_step=purge, filename_suffix=f".{point.step}")
        elif point.kind in ("train", "evaluation"):
            for name, value in numbers(point).items():
                self._writer.add_scalar(name, value, point.step)
        elif point.kind == "end" and self._writer is not None:
            self._writer.close()


class _Wandb:
    def __init__(self, library: Any, settings: dict[str, Any]):
        self._library, self._settings = library, settings
        self._run: Any = None

    def __call__(self, point: Point) -> None:
        if point.kind == "begin":
            self._run = self._library.init(**self._settings)
            self._run.define_metric("*", step_metric="step")  # so that a continued run may log a step again
        elif point.kind in ("train", "evaluation"):
            self._run.log({**numbers(point), "step": point.step})
        elif point.kind == "end" and self._run is not None:
            if point.goodput:
                self._run.summary["goodput"] = point.goodput.share
            self._run.finish()
