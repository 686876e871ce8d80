"""Time the steps of `fit` and `predict`, for both ways in which Keras runs them, and end the epoch when the clock says so.

If the user gives Keras a callback for each step, Keras waits for the step's loss before it calls the callback. Then nothing is
computed while the next batch is made. Without such a callback, Keras queues the next step while this one is computed. Then one
step is in flight here, too (see `StepClock`). With more steps in flight, single steps could not be timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock_bench.step_clock import StepClock
from penstock_bench.suites.keras.keras_setup import jax, keras


class AfterEachStep(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """A callback like TensorBoard's and ModelCheckpoint's: it gets the loss as a number, so Keras waits for the step's end."""

    def __init__(self, clock: StepClock):
        super().__init__()
        self._clock = clock

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._clock.ended()
        self.model.stop_training = not self._clock.more()


class OneInFlight(keras.callbacks.CallbackList):  # type: ignore[misc]  # Keras has no types
    """A replacement for Keras's callback list, because only the list gets arrays that may not be computed yet."""

    def __init__(self, clock: StepClock, model: Any):
        super().__init__(add_history=True, model=model)
        self._clock, self._model = clock, model

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._queued(logs)
        self._model.stop_training = not self._clock.more()

    def on_predict_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._queued(logs)
        self._model.stop_predicting = not self._clock.more()

    def _queued(self, logs: Any) -> None:
        # The step is one program, so its loss or prediction is ready when it has ended. Neither is donated to the next step.
        self._clock.queued(lambda: jax.block_until_ready(logs))
