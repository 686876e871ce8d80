"""What one run of a variant measures, and what it computes; the same for every framework."""

from __future__ import annotations

import itertools
import time

import numpy as np

from penstock.bench.model import Measurement, Outputs, VerificationError
from penstock.bench.suites.frameworks.clock import StepClock, milliseconds, settle
from penstock.bench.suites.frameworks.experiment import PARITY_STEPS, Experiment, Size
from penstock.bench.suites.frameworks.trainer import MakeTrainer, Trainer, cores
from penstock.bench.suites.frameworks.weights import fixed_batch, initial, updates


def outputs(make: MakeTrainer, experiment: Experiment, size: Size) -> Outputs:
    """Logits before training, the losses of some steps on a different batch each, and what those did to each weight.

    A wrong gradient cannot hide: it would be in the update of the weight, whatever the loss says.
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
    trainer = make(experiment, size)
    built = time.perf_counter()
    batch = trainer.place(fixed_batch(size.geometry, experiment.batch))
    placed = time.perf_counter()
    first_loss = trainer.loss(batch)
    first_step = time.perf_counter()
    settle()

    compute = StepClock(size.least, size.most, size.compute_seconds)
    trainer.train(itertools.repeat(batch), compute)
    bursts = max(1, experiment.loader_workers)
    together = StepClock(size.least * bursts, size.most * bursts, size.together_seconds)
    with trainer.loader() as batches:
        trainer.train(batches, together)
    loading = StepClock(size.least, size.most, size.loading_seconds)
    _load(trainer, loading)
    _check(trainer)
    return Measurement(
        # Loaders that work ahead deliver in bursts, so that a single batch takes next to nothing or much: the mean, no median.
        values={"loading": milliseconds(loading.ends, len(loading.ends) - 1)[0]},
        steps={
            "compute": milliseconds(compute.ends),
            "together": milliseconds(together.ends, bursts),
        },
        evidence={"loss": first_loss},
        details={
            **trainer.details,
            "threads": cores(),
            "seconds to import and build": built - begin,
            "seconds to the end of the first step, with compilation": first_step - placed,
        },
    )


def _load(trainer: Trainer, clock: StepClock) -> None:
    """The loader alone. Nothing is queued behind a batch: loaders that work ahead do so by themselves."""
    with trainer.loader() as batches:
        for batch in batches:
            trainer.wait(batch)
            clock.ended()
            if not clock.more():
                break


def _check(trainer: Trainer) -> None:
    """What was timed was training, not the propagation of NaNs."""
    if broken := [name for name, value in trainer.weights().items() if not np.isfinite(value).all()]:
        raise VerificationError(f"after training, {broken[0]} is not finite")
