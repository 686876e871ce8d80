"""Let a variant take its turns, and compute the outputs that are compared; the same for every framework."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.run_command import nvidia_gpu
from penstock_bench.activity import cores
from penstock_bench.garbage_collector import freeze_gc
from penstock_bench.model import Live, Measurement, Outputs, VerificationError
from penstock_bench.step_clock import StepClock
from penstock_bench.suites.frameworks import heap
from penstock_bench.suites.frameworks.experiment import PARITY_STEPS, Experiment, Size
from penstock_bench.suites.frameworks.trainer import MakeTrainer, Trainer
from penstock_bench.suites.frameworks.weights import fixed_batch, initial, norm, updates

_CORE = 60e9  # FLOP/s
_HELD = 10  # more batches than any loader of this suite makes ahead
_KEEPS_UP = 0.5  # a loader that takes less than this share of a step has made the next batch before it is wanted


def outputs(make: MakeTrainer, experiment: Experiment, size: Size) -> Outputs:
    """Compute logits before training, the losses of some steps on different batches, and the update of each weight.

    A wrong gradient changes the update of its weight, even if the loss barely changes.
    """
    trainer = make(experiment, size)
    geometry = size.geometry
    batches = [fixed_batch(geometry, experiment.parity_batch, number) for number in range(PARITY_STEPS)]
    logits = np.asarray(trainer.logits(trainer.place(batches[0])))
    losses = [trainer.loss(trainer.place(batch)) for batch in batches]
    changes = updates(initial(geometry), trainer.weights(), experiment.optimizer)
    return {"logits": logits, "loss": np.asarray(losses), **changes}


@contextlib.contextmanager
def live(make: MakeTrainer, experiment: Experiment, size: Size) -> Iterator[Live]:
    """Build a trainer and its loader, and warm them up."""
    begin = time.perf_counter()
    heap.free_a_large_block()
    trainer = make(experiment, size)
    built = time.perf_counter()
    batch = trainer.place(fixed_batch(size.geometry, experiment.batch))
    before = trainer.weights()
    placed = time.perf_counter()
    first_loss = trainer.loss(batch)
    first_step = time.perf_counter()
    # A backward pass that is wrong only at this batch size changes neither the first loss nor the parity check's outputs.
    first_update = norm(updates(before, trainer.weights(), experiment.optimizer))
    del before
    for _ in range(max(2, trainer.warm_up) - 1):
        began = time.perf_counter()
        trainer.loss(batch)
    step = time.perf_counter() - began
    with trainer.loader() as batches:
        alone = _takes_seconds(experiment, size)
        loading = _pace(trainer, batches, experiment)
        # A block starts with a full loader. If it keeps up, it makes one batch in each step, as in the middle of training. Else
        # the block would find batches that no step has paid for.
        skip = 0 if loading < _KEEPS_UP * step else _HELD
        freeze_gc()

        def compute(seconds: float) -> float:
            return _train(trainer, itertools.repeat(batch), StepClock(seconds, alone=alone))

        def together(seconds: float) -> float:
            burst = max(1, experiment.loader_workers)  # the workers of a loader deliver in bursts
            return _train(trainer, batches, StepClock(seconds, burst, skip, alone))

        def load(seconds: float) -> float:
            clock = StepClock(seconds, max(1, experiment.loader_workers), _HELD)
            for loaded in batches:
                trainer.wait(loaded)
                clock.ended()
                if not clock.more():
                    break
            return clock.milliseconds()

        def finish() -> Measurement:
            _check(trainer)
            details = {
                **trainer.details,
                "seconds to import and build": built - begin,
                "seconds to the end of the first step, with compilation": first_step - placed,
            }
            return Measurement(evidence={"loss": first_loss, "update": first_update}, details=details)

        yield Live({"compute": compute, "loading": load, "together": together}, finish)


def _train(trainer: Trainer, batches: Iterator[Any], clock: StepClock) -> float:
    trainer.train(batches, clock)
    return clock.milliseconds()


def _pace(trainer: Trainer, batches: Iterator[Any], experiment: Experiment) -> float:
    """Return the seconds in which the loader makes a batch."""
    for loaded in itertools.islice(batches, _HELD):  # the loader starts, and its buffers are drained
        trainer.wait(loaded)
    begin = time.perf_counter()
    count = max(2, 2 * experiment.loader_workers)
    for loaded in itertools.islice(batches, count):
        trainer.wait(loaded)
    return (time.perf_counter() - begin) / count


def _takes_seconds(experiment: Experiment, size: Size) -> bool:
    """Tell whether a step takes about a second or more, by its FLOPs: the same answer in every framework."""
    return not nvidia_gpu() and size.geometry.step_flops(experiment.batch) > cores() * _CORE


def _check(trainer: Trainer) -> None:
    """Check that what was timed was training, not the propagation of NaNs."""
    if broken := [name for name, value in trainer.weights().items() if not np.isfinite(value).all()]:
        raise VerificationError(f"after training, {broken[0]} is not finite")
