"""Train with Keras on JAX: `Model.fit`, as users call it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

from penstock_bench.model import VerificationError
from penstock_bench.step_clock import StepClock
from penstock_bench.suites.frameworks import jax_setup
from penstock_bench.suites.frameworks.experiment import ADAMW_EPSILON, BETAS, LEARNING_RATE, WEIGHT_DECAY, Experiment, Size
from penstock_bench.suites.frameworks.keras_vit import canonical, load, vit
from penstock_bench.suites.frameworks.weights import HostBatch, Weights, initial


class KerasTrainer(jax_setup.Batches):
    """The `Trainer` of Keras on JAX."""

    def __init__(self, experiment: Experiment, size: Size):
        if keras.backend.backend() != "jax":
            raise VerificationError(f"KERAS_BACKEND is {keras.backend.backend()!r}: this variant is Keras on JAX")
        super().__init__(experiment, size)
        jax_setup.configure(experiment.precision)
        keras.config.set_floatx("float32")  # whatever the user's ~/.keras says
        self._model = vit(size.geometry, experiment.precision == "bf16", experiment.attention == "fused")
        load(self._model, initial(size.geometry))
        self._model.compile(
            optimizer=_make_optimizer(experiment.optimizer),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=True,
        )
        self.details = jax_setup.details({"keras": keras.__version__})

    def logits(self, batch: HostBatch) -> np.ndarray:
        return np.asarray(self._model.predict_on_batch(batch.images))

    def loss(self, batch: HostBatch) -> float:
        # An epoch of one batch, because Keras reports the mean of the losses since the start of the epoch.
        only = (tuple(one) for one in [batch])
        return float(self._model.fit(only, steps_per_epoch=1, shuffle=False, verbose=0).history["loss"][0])

    def train(self, batches: Iterator[HostBatch], clock: StepClock) -> None:
        # One epoch, which the callback ends.
        generator = (tuple(batch) for batch in batches)
        self._model.fit(generator, shuffle=False, verbose=0, callbacks=_WithClock(clock, self._model))
        clock.finish()

    def weights(self) -> Weights:
        return canonical(self._model, self._size.geometry)


class _WithClock(keras.callbacks.CallbackList):  # type: ignore[misc]  # Keras has no types
    """A callback list that tells the clock of each step. `fit` calls it after a step is queued, with the loss as a JAX array.

    It replaces the list that `fit` creates. If a callback in that list has `on_train_batch_end`, the list first converts the logs
    to numbers. It does so on the thread that queues the steps, so no step is in flight meanwhile. If the callback is marked
    `async_safe`, it does so on other threads, and then `fit` may queue any number of steps.

    The step is one program, so its loss is ready when the step has ended. The loss is not part of the state, which is donated.
    """

    def __init__(self, clock: StepClock, model: keras.Model):
        super().__init__(add_history=True, model=model)
        self._clock, self._model = clock, model

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._clock.begin()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        assert logs is not None
        self._clock.queued(logs["loss"].block_until_ready)
        self._model.stop_training = not self._clock.more()


class _AdamW(keras.optimizers.AdamW):  # type: ignore[misc]  # Keras has no types
    """AdamW that adds epsilon where the other frameworks do.

    Keras adds epsilon to the root of the second moment before the bias correction, which at step 1 makes it 32 times as large.
    """

    epsilon: Any

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        step = keras.ops.cast(self.iterations + 1, variable.dtype)
        epsilon, self.epsilon = self.epsilon, self.epsilon * keras.ops.sqrt(1 - self.beta_2**step)
        try:
            super().update_step(gradient, variable, learning_rate)
        finally:
            self.epsilon = epsilon


def _make_optimizer(name: str) -> keras.optimizers.Optimizer:
    if name == "sgd":
        return keras.optimizers.SGD(LEARNING_RATE)
    beta_1, beta_2 = BETAS
    return _AdamW(LEARNING_RATE, beta_1=beta_1, beta_2=beta_2, epsilon=ADAMW_EPSILON, weight_decay=WEIGHT_DECAY)
