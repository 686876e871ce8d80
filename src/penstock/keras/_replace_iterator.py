"""Turning threaded epochs on and off: one class of Keras is exchanged for one of ours, and put back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from penstock.keras._session import Session, ThreadedEpochs
from penstock.keras._versions import behaviour, require_keras

_VARIABLE = "KERAS_JAX_EPOCH_ITERATOR"
_CHOICES = ("default", "threaded")


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
    if Session.epochs is None:
        Session.epochs = ThreadedEpochs()
    return Session.epochs


def disable_threaded_epochs() -> None:
    """Undo `enable_threaded_epochs`. Runs that are going on go on as they began."""
    Session.epochs = None
    if not Session.data_was_made:
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
    before = Session.epochs
    Session.epochs = None
    try:
        yield enable_threaded_epochs()
    finally:
        if before is None:
            disable_threaded_epochs()
        else:
            _exchange()
            Session.epochs = before


def enable_for_data() -> None:
    """Put our class in place for the sake of data made by `data()`; other data is left to Keras."""
    _exchange()
    Session.data_was_made = True


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
    if Session.original is not None:
        return
    trainer = _trainer_module()
    from penstock.keras._epoch_iterator import ThreadedEpochIterator

    Session.original, trainer.JAXEpochIterator = trainer.JAXEpochIterator, ThreadedEpochIterator


def _put_back() -> None:
    if Session.original is not None:
        _trainer_module().JAXEpochIterator = Session.original
        Session.original = None


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
