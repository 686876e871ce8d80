"""Measure how long a batch in memory is on its way into a step of `fit`: with threaded epochs, and with Keras alone.

    pip install -e . -e "bench[suites]"
    python bench/scripts/keras_path.py --json path.json

The workload is `overhead` of `penstock bench keras`: a dense layer on small arrays, which needs no thread. Epochs of both kinds
take turns in one process, in a random order that is then reversed, so that neither memory layout nor drift differs. A clock runs
while Keras asks for an execution and while the train function takes its batch; both include making the batch, about 50 µs. An
epoch gives the median over its steps. The difference is between two neighbouring epochs, and its interval is the bootstrap's.

These times cannot be measured in a loop of their own. Programs of XLA fill the caches, so Python takes several times as long
between them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import scipy.stats

_KINDS = ("default", "default again", "threaded")
_FIRST = 20  # steps of an epoch that are left out: looks at the devices are frequent there


class _Clock:
    """The microseconds that each batch was on its way."""

    def __init__(self) -> None:
        self.took: list[float] = []

    def executions(self, executions: Iterator[Any]) -> Iterator[Any]:
        """Yield the executions of an epoch, and note how long each of them and its batch took."""
        batch = _TimedBatches()
        while True:
            begin = time.perf_counter()
            try:
                first, last, batch.batches = next(executions)
            except StopIteration:
                return
            batch.seconds = time.perf_counter() - begin
            yield first, last, batch
            self.took.append(1e6 * batch.seconds)


class _TimedBatches:
    """An iterator over batches that notes how long a batch takes, in seconds."""

    batches: Iterator[Any]
    seconds = 0.0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        begin = time.perf_counter()
        batch = next(self.batches)
        self.seconds += time.perf_counter() - begin
        return batch


@contextlib.contextmanager
def _timed(clock: _Clock) -> Iterator[None]:
    """Let the clock run in the epochs of the iterator that Keras uses now."""
    from keras.src.backend.jax import trainer

    begin = trainer.JAXEpochIterator.__iter__
    with mock.patch.object(trainer.JAXEpochIterator, "__iter__", lambda self: clock.executions(begin(self))):
        yield


def measure(epochs: int, steps: int) -> dict[str, list[float]]:
    """Return the median microseconds of each epoch, by its kind."""
    import penstock.keras
    from penstock_bench.garbage_collector import freeze_gc
    from penstock_bench.step_clock import StepClock
    from penstock_bench.suites.keras.callbacks import OneInFlight
    from penstock_bench.suites.keras.keras_setup import configure
    from penstock_bench.suites.keras.workload import TASKS, find

    configure()
    size = find("overhead").sizes["full"]
    job = next(task for task in TASKS if task.name == "overhead").make(size)

    def epoch(kind: str, steps: int) -> float:
        clock, steps_clock = _Clock(), StepClock(math.inf)
        switch = penstock.keras.threaded_epochs() if kind == "threaded" else contextlib.nullcontext()
        with switch, _timed(clock):
            steps_clock.begin()
            job.model.fit(**job.inputs, steps_per_epoch=steps, callbacks=OneInFlight(steps_clock, job.model), verbose=0)
        return median(clock.took[_FIRST:])

    for kind in _KINDS:
        epoch(kind, size.warm_up + _FIRST)
    freeze_gc()
    found: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    rng = random.Random(0)
    for _ in range(epochs // 2):
        order = rng.sample(_KINDS, len(_KINDS))
        for kind in order + order[::-1]:
            found[kind].append(epoch(kind, steps))
    return found


def main() -> None:
    """Measure, print the table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=200, help="of each kind (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help=f"of an epoch, more than {_FIRST} (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    if args.epochs < 2 or args.steps <= _FIRST:
        parser.error(f"at least 2 epochs of more than {_FIRST} steps are needed")
    found = measure(args.epochs, args.steps)
    print(f"{'epochs':16} µs a batch   more than default (95 %)")
    for kind, took in found.items():
        more = np.subtract(took, found["default"])
        interval = scipy.stats.bootstrap((more,), np.median, random_state=0).confidence_interval if more.any() else (0.0, 0.0)
        print(f"{kind:16} {median(took):10.2f}   {np.median(more):.2f} ({interval[0]:.2f} to {interval[1]:.2f})")
    if args.json:
        args.json.write_text(json.dumps({"microseconds": found}) + "\n")


if __name__ == "__main__":
    main()
