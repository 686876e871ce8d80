"""Runs the variants of a workload, interleaved, each in a fresh process.

Machines drift: they warm up, and others use them too. So a round runs every variant once, in an order of its own,
and variants are compared within rounds. A fresh process for each keeps one variant's threads, caches and imports
away from the next.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.bench.model import Failure, Missing, Outcome, Sample, SizeName, Variant, Workload

# Names on the package index that differ from the module's.
_PACKAGES = {"tensorflow": "tensorflow-cpu"}

_QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}


@dataclass(frozen=True)
class Harness:
    """How to run workloads.

    Attributes:
      module: the suite's module, which has them in its `WORKLOADS`; a worker process imports it by this name.
      seed: of the order of the variants within each round.
      say: is told what runs next.
    """

    module: str
    size: SizeName
    rounds: int
    seed: int
    say: Callable[[str], None] = lambda text: None

    def run(self, workload: Workload) -> Outcome:
        needed = {variant.name: missing_packages(variant) for variant in workload.variants}
        missing = tuple(Missing(name, packages) for name, packages in needed.items() if packages)
        running = [name for name, packages in needed.items() if not packages]
        samples: list[Sample] = []
        failures: list[Failure] = []
        for number in range(self.rounds):
            for position, variant in enumerate(round_order(running, self.seed, workload.name, number)):
                self.say(f"{workload.name}, round {number + 1} of {self.rounds}: {variant}")
                result = self._measure(workload, variant, number, position)
                if isinstance(result, Sample):
                    samples.append(result)
                else:
                    failures.append(result)
                    running.remove(variant)
        return Outcome(workload, self.size, tuple(samples), tuple(failures), missing)

    def _measure(self, workload: Workload, variant: str, number: int, position: int) -> Sample | Failure:
        command = [sys.executable, "-m", "penstock.bench.worker", self.module, workload.name, variant, self.size]
        begin = time.perf_counter()
        finished = _run(command, workload.time_limit)
        seconds = time.perf_counter() - begin
        output = "\n".join(part.strip() for part in (finished.stdout, finished.stderr) if part.strip())
        if finished.timed_out:
            return Failure(variant, number, f"took more than its {workload.time_limit:g} s", output)
        if finished.status != 0:
            return Failure(variant, number, _reason(finished.stderr, finished.status), output)
        result = _last_json(finished.stdout)
        if result is None or set(result.get("values", ())) != {metric.name for metric in workload.metrics}:
            return Failure(variant, number, "ended without a measurement of every metric", output)
        return Sample(variant, number, position, seconds, result["values"], result["details"])


def missing_packages(variant: Variant) -> tuple[str, ...]:
    """What to `pip install` for this variant."""
    absent = [module for module in variant.requires if importlib.util.find_spec(module) is None]
    return tuple(_PACKAGES.get(module, module) for module in absent)


def round_order(variants: Sequence[str], seed: int, workload: str, number: int) -> list[str]:
    """The variants in the order of this round, which is the same for the same seed."""
    order = list(variants)
    random.Random(f"{seed}/{workload}/{number}").shuffle(order)
    return order


@dataclass(frozen=True)
class _Finished:
    status: int
    stdout: str
    stderr: str
    timed_out: bool


def _run(command: Sequence[str], time_limit: float) -> _Finished:
    # A session of its own, so that what the worker started ends with it.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=_QUIET | os.environ,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=time_limit)
        return _Finished(process.returncode, stdout, stderr, timed_out=False)
    except subprocess.TimeoutExpired:
        _kill(process)
        stdout, stderr = process.communicate()
        return _Finished(process.returncode, stdout, stderr, timed_out=True)
    except BaseException:  # Ctrl-C, which does not reach a session of its own
        _kill(process)
        process.communicate()  # closes its pipes
        raise


def _kill(process: subprocess.Popen[str]) -> None:
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def _reason(stderr: str, status: int) -> str:
    """The error below the last Python traceback; or what ended the process."""
    if status < 0:
        return f"ended by signal {-status}"
    _, found, traceback = stderr.rpartition("Traceback (most recent call last):")
    errors = [line for line in traceback.splitlines() if line[:1].isalpha()] if found else []
    return errors[0].removeprefix("penstock.bench.model.") if errors else f"ended with status {status}"


def _last_json(stdout: str) -> dict[str, Any] | None:
    """The last line, if it is a JSON object: libraries may have printed others before it."""
    lines = stdout.strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return result if isinstance(result, dict) else None
