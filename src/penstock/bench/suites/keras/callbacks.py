"""Time the steps of `fit` and `predict`, in the two ways in which Keras waits for them or does not.

Where a user gives Keras a callback that wants to know of each step, it waits for the step's loss before it calls it, so that
nothing is computed while the next batch is made. Where the user gives none, it queues the next step while this one is computed.
Then there is one in flight here too (see `StepClock`), and not any number, as those could not be told apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.bench.step_clock import StepClock
from penstock.bench.suites.keras.keras_setup import jax, keras


def new_clock() -> StepClock:
    """Return a clock that never stops a run: the input ends by itself."""
    return StepClock(least=0, most=0, seconds=0.0)


class AfterEachStep(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """A callback as TensorBoard's and ModelCheckpoint's: it gets the loss as a number, so after the step's end."""

    def __init__(self, clock: StepClock):
        super().__init__()
        self._clock = clock

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._clock.ended()


class OneInFlight(keras.callbacks.CallbackList):  # type: ignore[misc]  # Keras has no types
    """A callback list in the place of Keras's own, as only the list gets arrays that may not be there yet."""

    def __init__(self, clock: StepClock, model: Any):
        super().__init__(add_history=True, model=model)
        self._clock = clock

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._queued(logs)

    def on_predict_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._queued(logs)

    def _queued(self, logs: Any) -> None:
        # The step is one program, so its loss or its prediction is there when it has ended. Neither is donated to the next.
        self._clock.queued(lambda: jax.block_until_ready(logs))
