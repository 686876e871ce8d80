"""Measure how long the threads of `fit` work and wait for a core: with threaded epochs, and with Keras alone.

    pip install -e . -e "bench[suites]"
    penstock run -- python bench/scripts/keras_threads.py bert-fit-memmap --json threads.json

The workload is one of `penstock bench keras` in which `fit` does not wait for each step, at the size of its report. Epochs of
both kinds take turns in one process, in a random order that is then reversed. An epoch gives one number for each kind of thread:
the loop of `fit`, threads that read ahead, and XLA's threads. They are from /proc (Linux), between a step near the start
and one near the end, per step. The difference is between two neighbouring epochs, and its interval is the bootstrap's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import scipy.stats

from penstock_bench.suites.keras.task import Task
from penstock_bench.suites.keras.workload import TASKS, find

_KINDS = ("default", "default again", "threaded")
_FIRST = 10  # number of the step at which the measurement begins: the buffers are full
_AFTER = 10  # steps after it: the threads still read
_COLUMNS = {  # milliseconds a step, by the name of a sum
    "loop": "fit's own thread works",
    "loop waits": "and waits for a core",
    "readers": "other threads of Python work",
    "readers waits": "and wait",
    "XLA": "threads of XLA work",
    "XLA waits": "and wait",
}


def _milliseconds() -> Counter[str]:
    """Return the milliseconds that the threads of this process have worked and waited for a core so far, by their kind."""
    threads = {thread.native_id: "readers" for thread in threading.enumerate()}
    threads[os.getpid()] = "loop"
    found: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            worked, waited, _ = (task / "schedstat").read_text().split()
            kind = threads.get(int(task.name), "XLA")
            found[kind] += int(worked) / 1e6
            found[f"{kind} waits"] += int(waited) / 1e6
    return found


def _epoch(kind: str, job: Any, steps: int) -> dict[str, float]:
    """Train an epoch; return the milliseconds of a step, and of each kind of thread in it."""
    import jax

    import penstock.keras
    from penstock_bench.step_clock import StepClock
    from penstock_bench.suites.keras.callbacks import OneInFlight

    clock = StepClock(math.inf, skip=_FIRST)
    at: dict[int, Counter[str]] = {}

    class Callbacks(OneInFlight):
        def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
            super().on_train_batch_end(batch, logs)
            if batch + 1 in (_FIRST, steps):
                jax.block_until_ready(logs)
                at[batch + 1] = _milliseconds()

    if job.batches is not None:
        job.batches.forget()
    switch = penstock.keras.threaded_epochs() if kind == "threaded" else contextlib.nullcontext()
    with switch:
        clock.begin()
        job.model.fit(**job.inputs, steps_per_epoch=steps + _AFTER, callbacks=Callbacks(clock, job.model), verbose=0)
    clock.finish()
    during = {name: (at[steps][name] - at[_FIRST][name]) / (steps - _FIRST) for name in _COLUMNS}
    return {"step": clock.milliseconds(), **during}


def _tasks() -> dict[str, Task]:
    """Return the tasks in which Keras does not wait for each step, by name."""
    return {task.name: task for task in TASKS if task.method == "fit" and not task.each_step}


def measure(workload: str, epochs: int, steps: int) -> dict[str, list[dict[str, float]]]:
    """Return the milliseconds of each epoch, by its kind."""
    from penstock_bench.garbage_collector import freeze_gc
    from penstock_bench.suites.keras import cache
    from penstock_bench.suites.keras.keras_setup import configure

    with cache.at_hand():
        configure()
        job = _tasks()[workload].make(find(workload).sizes["full"])
        for kind in _KINDS:
            _epoch(kind, job, _FIRST + 2)
        freeze_gc()
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in _KINDS}
        rng = random.Random(0)
        for _ in range(epochs // 2):
            order = rng.sample(_KINDS, len(_KINDS))
            for kind in order + order[::-1]:
                found[kind].append(_epoch(kind, job, steps))
    return found


def main() -> None:
    """Measure, print the table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=_tasks(), metavar="workload", help=", ".join(_tasks()))
    parser.add_argument("--epochs", type=int, default=80, help="of each kind (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help=f"of an epoch, more than {_FIRST} (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    if args.epochs < 2 or args.steps <= _FIRST:
        parser.error(f"at least 2 epochs of more than {_FIRST} steps are needed")
    most = _tasks()[args.workload].steps - _AFTER
    if args.steps > most:
        parser.error(f"--steps {args.steps}: an epoch of {args.workload} has {most} at the most, and {_AFTER} after them")
    if not Path("/proc/self/task").is_dir():
        parser.error("this system has no /proc/self/task (Linux has)")
    found = measure(args.workload, args.epochs, args.steps)
    print(f"{args.workload}, ms a step: {'':16}" + "".join(f"{kind:>16}" for kind in _KINDS) + "   threaded - default (95 %)")
    for name, label in {"step": "step", **_COLUMNS}.items():
        columns = {kind: [epoch[name] for epoch in found[kind]] for kind in _KINDS}
        more = np.subtract(columns["threaded"], columns["default"])
        low, high = scipy.stats.bootstrap((more,), np.median, random_state=0).confidence_interval
        line = "".join(f"{median(column):16.3f}" for column in columns.values())
        print(f"{label:{len(args.workload) + 29}}{line}   {np.median(more):+.3f} ({low:+.3f} to {high:+.3f})")
    if args.json:
        args.json.write_text(json.dumps({"workload": args.workload, "milliseconds": found}) + "\n")


if __name__ == "__main__":
    main()
