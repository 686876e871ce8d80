"""Measure goodput: the share of a run's time that was spent on steps whose result was kept, over all of its attempts.

An *attempt* is one process (or one set of processes) that works on the run: the first, or one after a stop or a crash. The
seconds of each attempt by activity are kept in goodput.json of the run folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock._atomic_write import replace
from penstock._clock import Clock

PARTS = ("init", "compile", "input", "step", "evaluation", "log", "save", "restore")
_BETWEEN = 1.0  # seconds between two writes of the file


@dataclass(frozen=True)
class Goodput:
    """Where the time of a run went, over all of its attempts. Times are in seconds.

    Attributes:
      step: number of steps that the state has had.
      attempts: number of attempts.
      seconds: time of all attempts, without the time between them.
      parts: seconds by activity. "init": the initial state was made. "compile": tracing and compiling. "input": the devices
        starved for the next batch. "step": training. "evaluation". "log": the loggers. "save": the loop waited for a checkpoint.
        "restore": reading one. "lost": steps of an attempt after the checkpoint from which the next one continued, which had to
        be repeated. "other": the rest.
      lost_steps: number of steps that were lost and repeated.
    """

    step: int
    attempts: int
    seconds: float
    parts: dict[str, float]
    lost_steps: int

    @property
    def share(self) -> float:
        """Return the share of the time, 0 to 1, that was spent on steps whose result was kept."""
        return self.parts["step"] / self.seconds if self.seconds > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return all values, and the share, for JSON."""
        return {**asdict(self), "share": self.share}

    def __str__(self) -> str:
        times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.parts.items() if seconds >= 0.05 and name != "step")
        attempts = f" in {self.attempts} attempts" if self.attempts > 1 else ""
        lost = f"; {self.lost_steps:,} steps were lost and repeated" if self.lost_steps else ""
        return f"{self.share:.1%} of {self.seconds:.1f} s{attempts} went into steps".replace("%", " %") + (
            f"; the rest: {times}{lost}" if times else lost
        )


@dataclass
class _Attempt:
    """The numbers of an attempt: the steps between which it worked, and its seconds by activity."""

    begin: int
    end: int
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    lost: int = 0  # number of its steps after the checkpoint from which the next attempt continued


class Meter:
    """A stopwatch of an attempt, which adds it to the earlier attempts in a file; None for a run without a folder."""

    def __init__(self, path: Path | None):
        self.clock = Clock()
        self._path = path
        self._start = time.perf_counter()
        self._written = -_BETWEEN
        self._loop_start: float | None = None
        self._others = 0.0  # seconds by activity before the loop began
        self._before = _read(path)
        self._now = _Attempt(0, 0)

    def begin(self, step: int) -> None:
        """Note the step from which the attempt continues. Steps of the attempt before that go beyond it are lost."""
        self._now = _Attempt(step, step)
        for attempt in self._before:
            kept = min(attempt.end - attempt.lost, max(step, attempt.begin))
            attempt.lost = attempt.end - kept

    def begin_loop(self) -> None:
        """Note that the loop begins. All its time counts as steps, but for the time of other activities."""
        self._loop_start, self._others = time.perf_counter(), sum(self.clock.values())

    @property
    def loop(self) -> float:
        """Return the seconds of the loop that were not spent on another activity."""
        if self._loop_start is None:
            return 0.0
        return time.perf_counter() - self._loop_start - (sum(self.clock.values()) - self._others)

    def reached(self, step: int, starved: float, *, write: bool = False) -> None:
        """Note the step that was reached, and the seconds for which the devices have starved. Write the file now and then."""
        total, loop = time.perf_counter() - self._start, self.loop
        parts = {name: self.clock.get(name, 0.0) for name in PARTS}
        parts["input"] = min(starved, loop)
        parts["step"] = loop - parts["input"]
        self._now = _Attempt(self._now.begin, step, total, parts)
        if self._path and (write or time.perf_counter() - self._written > _BETWEEN):
            attempts = [asdict(attempt) for attempt in (*self._before, self._now)]
            with contextlib.suppress(OSError):  # a training must not fail because of this file
                replace(self._path, json.dumps({"run": self.result().as_json(), "attempts": attempts}, indent=1))
            self._written = time.perf_counter()

    def result(self) -> Goodput:
        """Return the goodput of all attempts up to now."""
        attempts = [*self._before, self._now]
        parts = {name: sum(attempt.parts.get(name, 0.0) for attempt in attempts) for name in PARTS}
        lost = 0.0
        for attempt in attempts:
            if attempt.lost:
                worked = attempt.parts.get("step", 0.0) + attempt.parts.get("input", 0.0)
                share = attempt.lost / max(1, attempt.end - attempt.begin)
                for name in ("step", "input"):
                    parts[name] -= attempt.parts.get(name, 0.0) * share
                lost += worked * share
        seconds = sum(attempt.seconds for attempt in attempts)
        parts["lost"] = lost
        parts["other"] = max(0.0, seconds - sum(parts.values()))
        return Goodput(self._now.end, len(attempts), seconds, parts, sum(attempt.lost for attempt in attempts))


def _read(path: Path | None) -> list[_Attempt]:
    """Return the attempts before. A file that cannot be read counts as none: a training must not fail because of it."""
    try:
        return [_attempt(**attempt) for attempt in json.loads(path.read_text(encoding="utf-8"))["attempts"]] if path else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return []


def _attempt(begin: Any, end: Any, seconds: Any, parts: Any, lost: Any) -> _Attempt:
    """Return an attempt as JSON has it. It raises if a value is not of its type."""
    numbers = {name: float(value) for name, value in parts.items()}
    if not all(map(math.isfinite, (seconds, *numbers.values()))):
        raise ValueError("a time is not finite")
    return _Attempt(int(begin), int(end), float(seconds), numbers, int(lost))
