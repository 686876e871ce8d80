"""Measure one run of a variant, and compute the outputs that are compared; the same for every framework."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.bench.garbage_collector import freeze_gc
from penstock.bench.model import Measurement, Outputs, VerificationError
from penstock.bench.step_clock import StepClock, milliseconds
from penstock.bench.suites.frameworks import heap
from penstock.bench.suites.frameworks.experiment import PARITY_STEPS, Experiment, Size
from penstock.bench.suites.frameworks.trainer import MakeTrainer, Trainer, cores, nvidia_gpu
from penstock.bench.suites.frameworks.weights import fixed_batch, initial, norm, updates

_CORE = 60e9  # FLOP/s


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


def measure(make: MakeTrainer, experiment: Experiment, size: Size) -> Measurement:
    begin = time.perf_counter()
    heap.free_a_large_block()
    trainer = make(experiment, size)
    built = time.perf_counter()
    batch = trainer.place(fixed_batch(size.geometry, experiment.batch))
    before = trainer.weights()
    alone = _takes_seconds(experiment, size)
    # The workers of a loader deliver their batches in bursts, so at least one complete burst is timed.
    burst = max(1, experiment.loader_workers)
    with _started_loader(trainer) if alone else contextlib.nullcontext() as started:
        placed = time.perf_counter()
        first_loss = trainer.loss(batch)
        first_step = time.perf_counter()
        # A backward pass that is wrong only at this batch size changes neither the first loss nor the parity check's outputs.
        first_update = norm(updates(before, trainer.weights(), experiment.optimizer))
        del before
        for _ in range(trainer.warm_up - 1):
            trainer.loss(batch)
        freeze_gc()

        compute = StepClock(size.least, size.most, size.compute_seconds, alone)
        trainer.train(itertools.repeat(batch), compute)
        together = StepClock(size.least * burst, size.most * burst, size.together_seconds, alone)
        with contextlib.nullcontext(started) if started else trainer.loader() as batches:
            trainer.train(batches, together)
    loading = StepClock(size.least * burst, size.most * burst, size.loading_seconds)
    _load(trainer, loading)
    _check(trainer)
    return Measurement(
        # Means, not medians: with a slow loader, most steps find a batch ready, and a few wait long for the next.
        values={name: float(np.mean(milliseconds(clock.ends))) for name, clock in (("loading", loading), ("together", together))},
        steps={name: milliseconds(clock.ends) for name, clock in (("compute", compute), ("together", together))},
        evidence={"loss": first_loss, "update": first_update},
        details={
            **trainer.details,
            "seconds to import and build": built - begin,
            "seconds to the end of the first step, with compilation": first_step - placed,
        },
    )


@contextlib.contextmanager
def _started_loader(trainer: Trainer) -> Iterator[Iterator[Any]]:
    """Start a loader, wait for its first batch, and let it fill its buffers while something else is computed.

    Use it if the first step is timed. As in the middle of training, that step then finds a batch that was made during the step
    before, and its time does not include the start of the loader.
    """
    with trainer.loader() as batches:
        first = next(batches)
        trainer.wait(first)
        yield itertools.chain([first] * trainer.looks_ahead, batches)


def _load(trainer: Trainer, clock: StepClock) -> None:
    """Time the loader alone. Wait for each batch before the next is requested; loaders read ahead by themselves."""
    with trainer.loader() as batches:
        for batch in batches:
            trainer.wait(batch)
            clock.ended()
            if not clock.more():
                break


def _takes_seconds(experiment: Experiment, size: Size) -> bool:
    """Tell whether a step takes about a second or more, by its FLOPs: the same answer in every framework."""
    return not nvidia_gpu() and size.geometry.step_flops(experiment.batch) > cores() * _CORE


def _check(trainer: Trainer) -> None:
    """Check that what was timed was training, not the propagation of NaNs."""
    if broken := [name for name, value in trainer.weights().items() if not np.isfinite(value).all()]:
        raise VerificationError(f"after training, {broken[0]} is not finite")
