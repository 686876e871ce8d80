"""Turning threaded epochs on and off: one class of Keras is exchanged for one of ours, and put back."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from typing import Any

from penstock._feed.stats import Stats
from penstock.keras._versions import behaviour, require_keras

_VARIABLE = "KERAS_JAX_EPOCH_ITERATOR"
_CHOICES = ("default", "threaded")

_REMEMBERED = 64  # runs whose statistics are kept: a process may train for months


class ThreadedEpochs:
    """What threaded epochs did since they were turned on."""

    def __init__(self) -> None:
        self._runs: deque[list[Stats]] = deque(maxlen=_REMEMBERED)

    def begin(self) -> list[Stats]:
        """A new run: a list for its statistics, once there are any."""
        run: list[Stats] = []
        self._runs.append(run)
        return run

    def stats(self) -> list[Stats]:
        """Where the time of each run went: one for each `fit`, `evaluate` and `predict`, and for the validation data of a `fit`.

        In the order in which they began to read, the last 64; their epochs are added up. What lies between epochs
        is left out.
        """
        return [stats for run in self._runs for stats in run]


class _Switch:
    """The state of the switch. Runs that are going on keep what they began with."""

    epochs: ThreadedEpochs | None = None  # None: off
    original: Any = None  # Keras's own class, while ours is in its place
    data_was_made = False  # our class serves data made by `data()`, whether threaded epochs are on or not


def enable_threaded_epochs() -> ThreadedEpochs:
    """Let every `fit`, `evaluate` and `predict` of Keras on JAX read and place its batches ahead of time, on a thread.

    Losses and weights stay what they are without, bit for bit. Calling it again changes nothing.

    Returns:
      The `ThreadedEpochs`, whose `stats()` tell where the time went.

    Raises:
      UnsupportedVersionError: Keras is not installed, or of a version that penstock does not work with. An ImportError.
      RuntimeError: Keras runs on another backend.
    """
    _exchange()
    if _Switch.epochs is None:
        _Switch.epochs = ThreadedEpochs()
    return _Switch.epochs


def disable_threaded_epochs() -> None:
    """Undo `enable_threaded_epochs`. Runs that are going on go on as they began."""
    _Switch.epochs = None
    if not _Switch.data_was_made:
        _put_back()


@contextlib.contextmanager
def threaded_epochs() -> Iterator[ThreadedEpochs]:
    """`enable_threaded_epochs` for a `with` block, or as a decorator of a function; what was on before stays on after it.

    Raises:
      UnsupportedVersionError, RuntimeError: as `enable_threaded_epochs`.

    Example:
      >>> import os; os.environ["KERAS_BACKEND"] = "jax"
      >>> import keras, numpy as np, penstock.keras as pk
      >>> model = keras.Sequential([keras.layers.Dense(1)])
      >>> model.compile("sgd", "mse")
      >>> with pk.threaded_epochs() as epochs:
      ...     history = model.fit(np.ones((64, 4)), np.ones(64), epochs=2, verbose=0)
      >>> [stats.steps for stats in epochs.stats()]
      [4]
    """
    before = _Switch.epochs
    _Switch.epochs = None
    try:
        yield enable_threaded_epochs()
    finally:
        if before is None:
            disable_threaded_epochs()
        else:
            _exchange()
            _Switch.epochs = before


def enable_for_data() -> None:
    """Put our class in place for the sake of data made by `data()`; other data is left to Keras."""
    _exchange()
    _Switch.data_was_made = True


def current() -> ThreadedEpochs | None:
    """None while threaded epochs are off."""
    return _Switch.epochs


def follow_environment() -> None:
    """Turn threaded epochs on if the environment asks for them.

    Raises:
      ValueError: it asks for something that there is not.
      UnsupportedVersionError, RuntimeError: as `enable_threaded_epochs`.
    """
    choice = os.environ.get(_VARIABLE) or "default"
    if choice not in _CHOICES:
        raise ValueError(f"{_VARIABLE}={choice!r}: choose from {', '.join(_CHOICES)}, or leave it unset")
    if choice == "threaded":
        enable_threaded_epochs()


def _exchange() -> None:
    if _Switch.original is not None:
        return
    trainer = _trainer_module()
    from penstock.keras._epochs import ThreadedEpochIterator

    _Switch.original, trainer.JAXEpochIterator = trainer.JAXEpochIterator, ThreadedEpochIterator


def _put_back() -> None:
    if _Switch.original is not None:
        _trainer_module().JAXEpochIterator = _Switch.original
        _Switch.original = None


def _trainer_module() -> Any:
    """Return the module of Keras whose functions look up the class of their iterator in it.

    Raises:
      UnsupportedVersionError: no Keras, or an unknown one, which is not imported: it may fail at that in its own way.
      RuntimeError: Keras runs on another backend.
    """
    require_keras()
    import keras

    if (backend := keras.backend.backend()) != "jax":
        raise RuntimeError(
            f"Keras runs on the backend {backend!r}, which has a training loop of its own; threaded epochs are for JAX: set "
            "KERAS_BACKEND=jax before Keras is imported, or train without threaded epochs"
        )
    from keras.src.backend.jax import trainer

    behaviour()  # refuses a build that is not what its number says, before anything is exchanged
    return trainer
