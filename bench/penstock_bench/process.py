"""Start a variant's process, wait for it, and kill it after its time limit; return its measurement and its output."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock
from penstock_bench import worker
from penstock_bench.model import Variant, Workload

# For penstock's own suites, which download nothing.
_QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}


IN_WORKER = "PENSTOCK_BENCH_WORKER"  # the variable that is set in processes that are measured

_LAST_WORDS = 10.0  # seconds
_KEPT = 20_000  # characters of each end of what a process wrote


@dataclass(frozen=True)
class Finished:
    """A worker process that has ended.

    Attributes:
      reason: the error, in one line; None if it succeeded.
      output: the text that it wrote to stdout and stderr.
      result: its measurement, as read from JSON; None if it failed before, or only computed outputs.
    """

    reason: str | None
    output: str
    result: Mapping[str, Any] | None


def run_variant(
    module: str, workload: Workload, variant: Variant, size: str, cache: Path, outputs: Path | None = None
) -> Finished:
    """Start the worker for a variant and wait for it.

    Args:
      module: the name of the suite's module, or another source of its workloads (see `suites.find`).
      workload, variant: the variant to run.
      size: the name of the workload's size.
      cache: a folder in which compilers may cache their results for later processes of the same variant.
      outputs: the file to which the variant's outputs are written; None to measure the variant instead.

    Returns:
      The process, which has ended, by itself or by its time limit.

    Raises:
      KeyboardInterrupt: Ctrl-C was pressed; the process has been killed.
    """
    # The result goes through a file, because libraries may print anything to stdout.
    result = cache / "result.json"
    result.unlink(missing_ok=True)
    written = ["--outputs", str(outputs)] if outputs else ["--result", str(result)]
    command = worker_command(module, workload, variant, size, *written)
    try:
        ended = _run(command, workload.time_limit, worker_variables(module, variant, cache))
    except OSError as error:
        return Finished(f"{command[0]} cannot be started: {error}", "", None)
    output = both_ends("\n".join(part.strip() for part in (ended.stdout, ended.stderr) if part.strip()))
    reason = None
    if ended.timed_out:
        reason = f"took more than its {workload.time_limit:g} s"
    elif ended.status != 0:
        reason = reason_of(ended.stderr, ended.status)
    return Finished(reason, output, _read(result))


def worker_command(module: str, workload: Workload, variant: Variant, size: str, *more: str) -> list[str]:
    """Return the command that starts the worker of a variant, in the interpreter that the variant needs."""
    python = str(variant.environment.python) if variant.environment else sys.executable
    return [python, worker.__file__, module, workload.name, variant.name, size, *more]


def worker_variables(module: str, variant: Variant, cache: Path) -> dict[str, str]:
    """Return the environment variables of a variant's worker: the variant's come first, then the user's."""
    ours = _QUIET if module.startswith("penstock_bench.") else {}
    folder = str(Path(penstock.__file__).parent)
    return {**ours, "PENSTOCK_BENCH_CACHE": str(cache), **os.environ, IN_WORKER: "1", worker.FOLDER: folder, **variant.variables}


@dataclass(frozen=True)
class _Ended:
    status: int
    stdout: str
    stderr: str
    timed_out: bool


_running: set[subprocess.Popen[str]] = set()  # those that a thread waits for; `add` and `discard` are atomic


def kill_all() -> None:
    """Kill the processes that other threads wait for, which then return: after Ctrl-C, which only the main thread gets."""
    for process in list(_running):
        kill(process)


def _run(command: Sequence[str], time_limit: float, environment: Mapping[str, str]) -> _Ended:
    # In a session of its own, so that the processes that the worker starts can be killed with it.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    _running.add(process)
    try:
        stdout, stderr = process.communicate(timeout=time_limit)
        return _Ended(process.returncode, stdout, stderr, timed_out=False)
    except subprocess.TimeoutExpired:
        kill(process)
        stdout, stderr = _rest(process)
        return _Ended(process.returncode, stdout, stderr, timed_out=True)
    except BaseException:  # Ctrl-C, which does not reach a session of its own
        kill(process)
        _rest(process)
        raise
    finally:
        _running.discard(process)


def _rest(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return the output of a killed process. Do not wait for ever: a process in another session may keep the pipes open."""
    try:
        return process.communicate(timeout=_LAST_WORDS)
    except subprocess.TimeoutExpired as late:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait()
        return _text(late.stdout), _text(late.stderr)


def _text(written: bytes | str | None) -> str:
    return written.decode(errors="replace") if isinstance(written, bytes) else written or ""


def both_ends(output: str) -> str:
    """Return the start and the end of a long output, because it goes into every file of the report."""
    if len(output) <= 2 * _KEPT:
        return output
    return f"{output[:_KEPT]}\n… {len(output) - 2 * _KEPT:,} characters …\n{output[-_KEPT:]}"


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a worker and the processes that it has started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def reason_of(stderr: str, status: int) -> str:
    """Return the error below the last Python traceback; without one, say how the process ended."""
    if status < 0:
        return f"ended by signal {-status}"
    _, found, traceback = stderr.rpartition("Traceback (most recent call last):")
    errors = [line for line in traceback.splitlines() if line[:1].isalpha()] if found else []
    return errors[0].removeprefix("penstock_bench.model.") if errors else f"ended with status {status}"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) else None
