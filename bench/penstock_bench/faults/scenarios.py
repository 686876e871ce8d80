"""The scenarios of `penstock bench faults`: each breaks the training in one way, and counts how often it ended as it should."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from penstock.train.manifest import is_finished
from penstock_bench.faults.attempt import Attempt, Ended, Result, moments, read_result
from penstock_bench.faults.training import RESULT, ideal

_MOST_KILLS = 5  # of one run of Keras
CLOSE = 1e-5  # largest difference of parameters on another number of devices, where sums have another order
CLOSE_LOSSES = 1e-6  # largest difference of the loss of a step, on the same number of devices in more processes


@dataclass
class Outcome:
    """The outcome of a scenario.

    Attributes:
      name: the scenario.
      tried: how often the training was broken.
      good: how often it was as it should be afterwards.
      phases: in which phases it was broken, and how often.
      failures: what went wrong, in words.
      seconds: time of the whole scenario.
      notes: figures worth a line.
    """

    name: str
    tried: int = 0
    good: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def count(self, tried: int, problems: list[str]) -> None:
        """Count attempts that belong to one run; with a problem, none of them is good."""
        self.tried += tried
        self.good += 0 if problems else tried
        self.failures += problems


class Bench:
    """The scenarios, with what they are compared with.

    Args:
      folder: for the runs.
      seed: seed of the moments.
      say: is told what happens.
    """

    def __init__(self, folder: Path, seed: int, say: Callable[[str], None] = lambda text: None):
        self._folder, self._seed, self._say = folder, seed, say
        begin = time.perf_counter()
        self.reference = self._undisturbed("reference")
        self._usual = time.perf_counter() - begin
        self._ideal = ideal()
        if not np.array_equal(self.reference.arrays["seen"], self._ideal):
            raise AssertionError("the undisturbed training has not seen the records that the loader gives")

    def remove(self) -> None:
        """Remove the folders of all runs."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def kills(self, count: int) -> Outcome:
        """Kill the training by SIGKILL at random moments until it was killed so often; each run is continued to its end."""
        return self._broken("kill -9", count, signal.SIGKILL, lambda folder, ended: [])

    def signals(self, count: int) -> Outcome:
        """Stop the training by SIGTERM at random moments. It has to end with status 0 and a line that says how to go on."""

        def problems(folder: Path, ended: Ended) -> list[str]:
            if (folder / RESULT).exists() and ended.status == 0:
                return []  # the signal came in time for nothing but the end
            if ended.phase == "start of Python" and ended.status == -signal.SIGTERM:
                return []  # before the first instruction of any program
            if ended.status or not [line for line in ended.errors.splitlines() if "to continue" in line]:
                return [f"SIGTERM during {ended.phase}: status {ended.status}, {ended.errors.strip()[-300:]!r}"]
            return []

        return self._broken("SIGTERM", count, signal.SIGTERM, problems)

    def damaged(self, count: int) -> Outcome:
        """Break the newest checkpoint of a stopped run, in turn in each of five ways, and continue it."""
        outcome, draw, begin = Outcome("damaged checkpoint"), random.Random(self._seed), time.perf_counter()
        ways = (_truncate, _flip, _remove_file, _remove_manifest, _remove_arrays)
        for number in range(count):
            folder = self._folder / f"damaged-{number}"
            with Attempt(folder) as attempt:
                attempt.break_at(draw.uniform(0.05, 0.15), signal.SIGTERM, "step")
            checkpoints = sorted((folder / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
            way = ways[number % len(ways)]
            way(checkpoints[-1], draw)
            outcome.phases[way.__name__.strip("_").replace("_", " ")] += 1
            with Attempt(folder) as attempt:
                ended = attempt.end()
            problems = self._compare(folder, ended)
            if "is passed over" not in ended.errors:
                problems.append(f"{way.__name__} of {checkpoints[-1].name} was not reported: {ended.errors[-300:]!r}")
            outcome.count(1, [f"{way.__name__}: {problem}" for problem in problems])
            shutil.rmtree(folder)
        outcome.seconds = time.perf_counter() - begin
        return outcome

    def devices(self, count: int) -> Outcome:
        """Kill the training, and continue it on half the devices each time: 8, 4, 2, 1; with more kills again from 8."""
        return self._moved("kill -9, continued on 8, 4, 2, 1 devices", count, ((8, 1), (4, 1), (2, 1), (1, 1)))

    def processes(self, count: int) -> Outcome:
        """Kill the training, and continue it in 1, 2 and 1 processes, with 8 devices together."""
        return self._moved("kill -9, continued in 1, 2, 1 processes", count, ((8, 1), (8, 2), (8, 1)))

    def losses(self, count: int) -> Outcome:
        """Train in two processes with four devices each, and compare the losses with one process with eight."""
        outcome, begin = Outcome("2 processes with 4 devices, losses of 1 with 8"), time.perf_counter()
        one = self._undisturbed("one-process", devices=8).arrays
        for number in range(count):
            two = self._undisturbed(f"two-processes-{number}", devices=8, processes=2).arrays
            distance = float(np.abs(two["losses"] - one["losses"]).max())
            problems = [] if distance <= CLOSE_LOSSES else [f"losses differ by {distance:.2g}"]
            if not np.array_equal(two["seen"], self._ideal):
                problems.append("records are lost or repeated")
            outcome.count(1, problems)
            outcome.notes.append(f"{len(two['losses'])} losses differ by at most {distance:.2g}")
        outcome.seconds = time.perf_counter() - begin
        return outcome

    def _moved(self, name: str, count: int, places: tuple[tuple[int, int], ...]) -> Outcome:
        """Kill runs, and continue each time with the next number of devices and processes."""
        outcome, draw, begin = Outcome(name), random.Random(self._seed), time.perf_counter()
        kills = len(places) - 1
        for first in range(0, count, kills):
            folder, now = self._folder / f"{len(places)}-{first}", min(kills, count - first)
            for devices, processes in places[:now]:
                with Attempt(folder, devices, processes) as attempt:
                    ended = attempt.break_at(draw.uniform(0, 0.1), signal.SIGKILL, "step")
                    outcome.phases[ended.phase] += 1
            with Attempt(folder, *places[now]) as attempt:
                ended = attempt.end()
            outcome.count(now, self._compare(folder, ended, exact=False))
        outcome.seconds = time.perf_counter() - begin
        return outcome

    def keras(self, count: int) -> Outcome:
        """Kill a `model.fit` with `pk.Checkpoint` in the middle of epochs; every other run takes four steps at a time."""
        outcome, draw, begin = Outcome("model.fit, kill -9 in epochs"), random.Random(self._seed), time.perf_counter()
        options: tuple[tuple[str, ...], ...] = ((), ("--steps-per-execution", "4"))
        references = [self._undisturbed(f"keras-reference-{number}", *_keras(each)) for number, each in enumerate(options)]
        runs = 0
        while outcome.tried < count:
            kind, broken, problems = runs % len(options), 0, list[str]()
            folder, runs = self._folder / f"keras-{runs}", runs + 1
            while True:
                with Attempt(folder, 1, 1, *_keras(options[kind])) as attempt:
                    if broken == _MOST_KILLS or outcome.tried + broken == count:
                        ended = attempt.end()
                        break
                    ended = attempt.break_at(draw.uniform(0, 1.0), signal.SIGKILL, "step")
                if ended.phase == "end" and ended.status == 0:
                    break
                broken += 1
                outcome.phases[ended.phase] += 1
            problems += self._compare(folder, ended, reference=references[kind])
            outcome.count(broken, problems)
            self._say(f"{outcome.name}: {outcome.tried} of {count}, {len(outcome.failures)} failures")
            if not problems:
                shutil.rmtree(folder, ignore_errors=True)
        outcome.seconds = time.perf_counter() - begin
        outcome.notes.append(f"{runs} runs of {len(self._ideal)} batches")
        return outcome

    def disk(self, count: int) -> Outcome:
        """Let the disk be full during a save: an error says so, and with room the run continues from the one before."""
        outcome, begin = Outcome("full disk"), time.perf_counter()
        for number in range(count):
            folder = self._folder / f"disk-{number}"
            folder.mkdir()
            mounting = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
            if subprocess.run(mounting, capture_output=True, check=False).returncode:
                outcome.notes.append("not tried: a tmpfs cannot be mounted here")
                break
            try:
                with Attempt(folder) as attempt:
                    ended = attempt.end()
                outcome.phases["save"] += 1
                problems = [] if ended.status else ["the training ended as if nothing had happened"]
                if "no space left on the disk" not in ended.errors or "is intact" not in ended.errors:
                    problems.append(f"no error that says so: {ended.errors[-500:]!r}")
                subprocess.run(["mount", "-o", "remount,size=100m", str(folder)], check=True)
                with Attempt(folder) as attempt:
                    ended = attempt.end()
                outcome.count(1, problems + self._compare(folder, ended))
            finally:
                subprocess.run(["umount", str(folder)], check=True)
        outcome.seconds = time.perf_counter() - begin
        return outcome

    def _broken(self, name: str, count: int, number: signal.Signals, problems_of: Callable[[Path, Ended], list[str]]) -> Outcome:
        """Break runs until `count` attempts were broken, and compare each run that has ended with the undisturbed one."""
        outcome, when, begin = Outcome(name), moments(self._seed, self._usual), time.perf_counter()
        runs = 0
        while outcome.tried < count:
            folder, broken, problems = self._folder / f"{name.replace(' ', '')}-{runs}", 0, list[str]()
            runs += 1
            while True:
                if outcome.tried + broken == count:
                    with Attempt(folder) as attempt:
                        ended = attempt.end()
                    break
                with Attempt(folder) as attempt:
                    ended = attempt.break_at(*_with_signal(next(when), number))
                if ended.phase == "end" and ended.status == 0:
                    break
                broken += 1
                outcome.phases[ended.phase] += 1
                problems += problems_of(folder, ended)
            problems += self._compare(folder, ended)
            outcome.count(broken, problems)
            self._say(f"{name}: {outcome.tried} of {count}, {len(outcome.failures)} failures")
            shutil.rmtree(folder, ignore_errors=True)
        outcome.seconds = time.perf_counter() - begin
        outcome.notes.append(f"{runs} runs of {len(self._ideal)} steps")
        return outcome

    def _undisturbed(
        self, name: str, module: str = "training", options: tuple[str, ...] = (), *, devices: int = 1, processes: int = 1
    ) -> Result:
        with Attempt(self._folder / name, devices, processes, module, options) as attempt:
            ended = attempt.end()
        if ended.status:
            raise RuntimeError(f"the undisturbed training failed: {ended.errors[-2000:]}")
        return read_result(self._folder / name)

    def _compare(self, folder: Path, ended: Ended, exact: bool = True, reference: Result | None = None) -> list[str]:
        """Return the differences between the results of a run and of the undisturbed run."""
        reference = reference or self.reference
        try:
            result = read_result(folder)
        except FileNotFoundError:
            return [f"the run has no result (status {ended.status}): {ended.errors.strip()[-500:]}"]
        problems = []
        if not np.array_equal(result.arrays["seen"], self._ideal):
            wrong = np.flatnonzero((result.arrays["seen"] != self._ideal).any(axis=1))
            problems.append(f"records are lost or repeated, first at step {wrong[0]}")
        if exact and (different := [name for name, digest in reference.digests.items() if result.digests[name] != digest]):
            problems.append(f"not equal bit for bit: {', '.join(different)}")
        if not exact:
            distance = max(float(np.abs(result.arrays[name] - self.reference.arrays[name]).max()) for name in ("a", "b"))
            if not distance <= CLOSE:
                problems.append(f"parameters differ by {distance:.2g}")
        return problems


def _keras(options: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the training by Keras and its options, as an `Attempt` takes them."""
    return "keras_training", options


def _with_signal(moment: tuple[float, str | None], number: signal.Signals) -> tuple[float, signal.Signals, str | None]:
    return moment[0], number, moment[1]


def _files(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size > 0)


def _truncate(checkpoint: Path, draw: random.Random) -> None:
    path = draw.choice(_files(checkpoint))
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def _flip(checkpoint: Path, draw: random.Random) -> None:
    path = draw.choice([path for path in _files(checkpoint) if is_finished(checkpoint) and path.name != "MANIFEST.json"])
    content = bytearray(path.read_bytes())
    for _ in range(3):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _remove_file(checkpoint: Path, draw: random.Random) -> None:
    draw.choice(_files(checkpoint)).unlink()


def _remove_manifest(checkpoint: Path, draw: random.Random) -> None:
    (checkpoint / "MANIFEST.json").unlink()


def _remove_arrays(checkpoint: Path, draw: random.Random) -> None:
    shutil.rmtree(checkpoint / "state")
