"""Run an attempt of the training in a folder, in a process of its own; return how it ended, and its result."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock._stopping import GRACE
from penstock.train.manifest import is_finished
from penstock_bench.faults.training import RESULT

PHASES = ("start of Python", "import", "compile", "step", "save", "end")
_LONGEST = 120.0  # seconds; an attempt takes a few
_LOOK = 0.001  # seconds between two looks at the folder


@dataclass(frozen=True)
class Ended:
    """How an attempt ended.

    Attributes:
      status: exit status; negative for a signal.
      phase: what the process was doing when it was broken: one of `PHASES`.
      output: what it printed.
      errors: what it printed to stderr.
    """

    status: int
    phase: str
    output: str
    errors: str


class Attempt:
    """A running attempt. Use it in a `with`: it is killed at the end.

    Args:
      folder: the run folder.
      devices: number of CPU devices.
      processes: number of processes that share them.
      module: the training, a module of this package.
      options: further options of the training.
    """

    def __init__(
        self, folder: Path, devices: int = 1, processes: int = 1, module: str = "training", options: tuple[str, ...] = ()
    ):
        self.folder = folder
        self._unfinished = _unfinished(folder)  # by attempts before, which were killed
        self._output: list[str] = []
        self._errors: list[str] = []
        python = [sys.executable]
        if processes > 1:
            python += ["-m", "penstock", "launch", "-n", str(processes), "--devices-per-process", str(devices // processes)]
        self._process = subprocess.Popen(
            [*python, "-m", f"penstock_bench.faults.{module}", str(folder), "--devices", str(devices), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, GRACE: "30", "JAX_PLATFORMS": "cpu"},
        )
        pairs = ((self._process.stdout, self._output), (self._process.stderr, self._errors))
        self._readers = [threading.Thread(target=lambda s=s, t=t: t.extend(s), daemon=True) for s, t in pairs]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            if stream:
                stream.close()

    def break_at(self, seconds: float, number: signal.Signals, phase: str | None = None) -> Ended:
        """Send a signal after some time, and wait for the end.

        Args:
          seconds: time from the start; with a phase, from the moment when that is seen.
          number: the signal.
          phase: the phase to wait for, "save" or "step"; None for the start of the process.
        """
        begin = time.monotonic()
        while phase and self.phase() != phase and self._process.poll() is None and time.monotonic() - begin < _LONGEST:
            time.sleep(_LOOK)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        broken = self.phase()
        self._process.send_signal(number)
        return self._end(broken)

    def end(self) -> Ended:
        """Wait for the end of an attempt that is not disturbed."""
        return self._end("end")

    def phase(self) -> str:
        """Return what the process is doing, as far as its output and its folder show."""
        if self._process.poll() is not None:
            return "end"
        lines = [line.removeprefix("[0] ").split() for line in list(self._output)]
        if not lines:
            return "import" if self._listens() else "start of Python"
        kinds = {line[0] for line in lines if line}
        if _unfinished(self.folder) - self._unfinished:
            return "save"
        if "train" not in kinds:
            return "compile"
        return "end" if "end" in kinds else "step"

    def _listens(self) -> bool:
        """Return whether the process has a handler of SIGTERM. While the interpreter itself starts, no Python program can."""
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text()
        except OSError:  # no Linux, or the process has ended
            return True
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    def _end(self, phase: str) -> Ended:
        status = self._process.wait(_LONGEST)
        for reader in self._readers:
            reader.join()
        return Ended(status, phase, "".join(self._output), "".join(self._errors))


@dataclass(frozen=True)
class Result:
    """The result that a training has written at its end.

    Attributes:
      digests: SHA-256 of each array.
      arrays: the arrays.
    """

    digests: dict[str, str]
    arrays: dict[str, Any]


def _unfinished(folder: Path) -> set[tuple[str, int]]:
    """Return the folders of checkpoints that have no manifest: names and inode numbers."""
    found = set()
    for path in (folder / "checkpoints").glob("step-*"):
        with contextlib.suppress(OSError):
            if not is_finished(path):
                found.add((path.name, path.stat().st_ino))
    return found


def read_result(folder: Path) -> Result:
    """Read the result of a training.

    Raises:
      FileNotFoundError: it has not ended.
    """
    with np.load(folder / "result.npz") as arrays:
        return Result(json.loads((folder / RESULT).read_text())["digests"], dict(arrays))


def moments(seed: int, longest: float) -> Iterator[tuple[float, str | None]]:
    """Yield moments to break a training at, without end: seconds, and the phase after which they begin (see `break_at`).

    Every other one is anywhere between the start of the process and its usual end; the others hit a save or a step.

    Args:
      seed: seed of the random numbers.
      longest: seconds that an undisturbed training takes.
    """
    draw = random.Random(seed)
    while True:
        yield draw.uniform(0, longest), None
        yield draw.uniform(0, 0.06), "save"
        yield draw.uniform(0, longest), None
        yield draw.uniform(0, 0.3), "step"
