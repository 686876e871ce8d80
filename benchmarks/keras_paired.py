"""Compare threaded epochs with Keras alone in one process, epoch by epoch, without the noise between processes.

    python benchmarks/keras_paired.py --pairs 20 --json benchmarks/results/keras-paired-cpu.json

`penstock bench keras` compares fresh processes, because users start fresh processes. On a shared machine, these differ by more
than threaded epochs could cost. Here, one process for each task trains one model. Epochs with and without threads take turns, and
every second round reverses the order. Another third of the epochs runs without threads, as the A/A control. The interval is over
pairs of epochs of this one process, so it holds only for this process: it shows the cost of the threads.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from penstock.bench import machine
from penstock.bench.statistics import FEWEST_PAIRS, compare
from penstock.bench.suites.keras.workload import TASKS, find

_KINDS = ("default", "threaded", "control")


def measure(name: str, pairs: int) -> dict[str, list[float]]:
    """Return milliseconds a step of so many epochs of each kind."""
    from penstock.bench.garbage_collector import freeze_gc
    from penstock.bench.step_clock import milliseconds
    from penstock.bench.suites.keras import cache
    from penstock.bench.suites.keras.callbacks import new_clock
    from penstock.bench.suites.keras.keras_setup import configure
    from penstock.bench.suites.keras.measure import mean_step, run_epoch, warm_up

    task, size = next(task for task in TASKS if task.name == name), find(name).sizes["full"]
    with cache.at_hand():
        configure()
        import penstock.keras as pk

        job = task.make(size)
        for kind in _KINDS:
            with pk.threaded_epochs() if kind == "threaded" else contextlib.nullcontext():
                warm_up(task, job, size)
        freeze_gc()
        taken: dict[str, list[float]] = {kind: [] for kind in _KINDS}
        for number in range(pairs):
            for kind in _KINDS if number % 2 else _KINDS[::-1]:
                clock = new_clock()
                with pk.threaded_epochs() if kind == "threaded" else contextlib.nullcontext():
                    run_epoch(task, job, clock)
                clock.finish()
                taken[kind].append(mean_step(milliseconds(clock.ends)))
    return taken


def _in_a_process(name: str, pairs: int, cache: str) -> dict[str, list[float]]:
    command = [sys.executable, __file__, "--measure", name, "--pairs", str(pairs)]
    environment = {**os.environ, "PENSTOCK_BENCH_CACHE": cache}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help=f"epochs of each kind, at least {FEWEST_PAIRS} (default: 20)")
    parser.add_argument("--only", action="append", choices=[task.name for task in TASKS], metavar="WORKLOAD")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.pairs)))
        return
    if args.pairs < FEWEST_PAIRS:
        parser.error(f"--pairs {args.pairs}: fewer than {FEWEST_PAIRS} give no interval")
    found = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as cache:
        for name in args.only or [task.name for task in TASKS]:
            taken = _in_a_process(name, args.pairs, cache)
            compared = {kind: compare(taken[kind], taken["default"]) for kind in ("threaded", "control")}
            found[name] = {"ms": taken, **{kind: vars(comparison) for kind, comparison in compared.items()}}
            threaded, control = compared["threaded"], compared["control"]
            print(
                f"{name:22} threaded / default {threaded.ratio:.3f} ({threaded.low:.3f} to {threaded.high:.3f}), "
                f"A/A control {control.ratio:.3f} ({control.low:.3f} to {control.high:.3f})",
                flush=True,
            )
    if args.json:
        args.json.write_text(
            json.dumps({"machine": machine.describe(), "pairs": args.pairs, "workloads": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
