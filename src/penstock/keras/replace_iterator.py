"""Threaded epochs for Keras, and data for `fit`, `evaluate` and `predict`: `enable_threaded_epochs` and `data`.

The trainer of Keras on JAX looks up the class `JAXEpochIterator` in its module for each `fit`, `evaluate` and `predict`. This
name is replaced. So is the trainer's method that builds a model on a first batch, to add notes to its errors.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from penstock.data.tree import Batch
from penstock.keras.session import Session, ThreadedEpochs
from penstock.keras.versions import build_method, require_jax

if TYPE_CHECKING:
    from penstock.keras.data_adapter import PenstockDataAdapter

_VARIABLE = "KERAS_JAX_EPOCH_ITERATOR"
_CHOICES = ("default", "threaded")


def enable_threaded_epochs() -> ThreadedEpochs:
    """Let every `fit`, `evaluate` and `predict` of Keras on JAX read and place its batches ahead of time, on a thread.

    Losses and weights are the same as without, bit for bit. Calling it again changes nothing.

    Returns:
      The `ThreadedEpochs`, whose `stats()` show where the time was spent.

    Raises:
      UnsupportedVersionError: Keras is not installed, or penstock does not work with its version. It is an ImportError.
      RuntimeError: Keras runs on another backend.

    Examples:
      >>> import os; os.environ["KERAS_BACKEND"] = "jax"
      >>> import keras, numpy as np, penstock.keras as pk
      >>> epochs = pk.enable_threaded_epochs()
      >>> model = keras.Sequential([keras.layers.Dense(1)])
      >>> model.compile("sgd", "mse")
      >>> history = model.fit(np.ones((64, 4)), np.ones(64), verbose=0)
      >>> [stats.steps for stats in epochs.stats()]
      [2]
      >>> pk.disable_threaded_epochs()
    """
    _install()
    if Session.epochs is None:
        Session.epochs = ThreadedEpochs()
    return Session.epochs


def disable_threaded_epochs() -> None:
    """Undo `enable_threaded_epochs`. A run that has begun continues as it began."""
    Session.epochs = None
    if not Session.data_was_made:
        _restore_original()


@contextlib.contextmanager
def threaded_epochs() -> Iterator[ThreadedEpochs]:
    """Enable threaded epochs for a `with` block, or for a function as its decorator, and restore the previous state at its end.

    Returns:
      A context manager that gives the `ThreadedEpochs`, whose `stats()` show where the time was spent.

    Raises:
      UnsupportedVersionError, RuntimeError: as for `enable_threaded_epochs`.

    Examples:
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
            _install()
            Session.epochs = before


def data(batches: Any, *, unpack: Callable[[Batch], Any] | None = None) -> PenstockDataAdapter:
    """Make data for `fit`, `evaluate` and `predict` of Keras on JAX, whose batches are read and placed ahead of time.

    - A finite `Loader` is one epoch, which begins at its start each time.
    - A `Loader` with `epochs=None` continues from epoch to epoch: an epoch of Keras is one epoch of the Loader, in an order of
      its own, or `steps_per_epoch` batches.
    - `Steps` without a length, and a `ps.stream` with `epochs=None`, have no end. They continue from epoch to epoch, and need
      `steps_per_epoch`. With a length, `Steps` are one epoch.
    - An iterable (a list, a Grain dataset, a torch `DataLoader`, a `tf.data.Dataset`) is one epoch, which begins at its start
      each time.
    - An iterator or generator continues from epoch to epoch, and needs `steps_per_epoch` for more than one epoch.
    - The batches of a `Feed` stay where its `to` has put them. You close the feed.

    *To continue a saved run*, give `fit` the callback `pk.Checkpoint(directory, batches)`. By hand: give a `Feed`, and save its
    `state()` beside the model at the end of an epoch. Or begin at the step of the optimizer, as a Loader with `epochs=None` is a
    function of the step: `pk.data(ps.Steps(lambda step: loader[done + step]))`, with `done = int(model.optimizer.iterations)` of
    the loaded model, and `steps_per_epoch`.

    `class_weight` and `steps_per_epoch` remain arguments of `fit`. Losses and weights are the same as with Keras's own iterator
    over the same batches.

    Args:
      batches: whatever `penstock.feed` takes. A batch is (x,), (x, y), (x, y, sample_weight), or x alone, with arrays [B, ...].
        x may be a dict with the names of the model's inputs as keys. With several processes, each gives only its own rows.
      unpack: a function from a batch of `batches` to a batch for Keras, such as `lambda b: (b["image"], b["label"])`.
        It runs on the thread that reads or places.

    Returns:
      A `DataAdapter` of Keras, for `x` or `validation_data`. Its `stats()` show where the time was spent.

    Raises:
      TypeError, ValueError: `batches` cannot be fed.
      UnsupportedVersionError, RuntimeError: as for `enable_threaded_epochs`.

    Examples:
      >>> import os; os.environ["KERAS_BACKEND"] = "jax"
      >>> import keras, numpy as np, penstock as ps, penstock.keras as pk
      >>> loader = ps.Loader((np.ones((64, 4), "f"), np.ones(64, "f")), batch_size=16, shuffle=True)
      >>> model = keras.Sequential([keras.layers.Dense(1)])
      >>> model.compile("sgd", "mse")
      >>> len(model.fit(pk.data(loader), epochs=3, verbose=0).history["loss"])
      3
    """
    enable_for_data()
    from penstock.keras.data_adapter import PenstockDataAdapter

    if unpack is not None and not callable(unpack):
        raise TypeError(f"unpack={unpack!r} is not a function from a batch to a batch")
    return PenstockDataAdapter(batches, unpack)


def enable_for_data() -> None:
    """Replace the class for the result of `data`. Our class leaves other data to Keras."""
    _install()
    Session.data_was_made = True


def follow_environment() -> None:
    """Enable threaded epochs if the environment variable KERAS_JAX_EPOCH_ITERATOR is "threaded".

    Raises:
      ValueError: the variable has an unknown value.
      UnsupportedVersionError, RuntimeError: as for `enable_threaded_epochs`.
    """
    choice = os.environ.get(_VARIABLE) or "default"
    if choice not in _CHOICES:
        raise ValueError(f"{_VARIABLE}={choice!r}: choose from {', '.join(_CHOICES)}, or leave it unset")
    if choice == "threaded":
        enable_threaded_epochs()


def _install() -> None:
    """Replace the class of Keras by ours, unless it is replaced already."""
    if Session.original is not None:
        return
    trainer = _trainer_module()
    from penstock.keras.epoch_iterator import ThreadedEpochIterator

    Session.original, trainer.JAXEpochIterator = trainer.JAXEpochIterator, ThreadedEpochIterator
    owner, name = build_method()
    setattr(owner, name, _with_notes(getattr(owner, name)))


def _with_notes(build: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that builds a model as `build` does, and adds a note to an error that our data may have caused."""

    @functools.wraps(build)
    def build_with_notes(self: Any, iterator: Any = None, *args: Any, **kwargs: Any) -> Any:
        try:
            return build(self, iterator, *args, **kwargs)
        except Exception as error:
            getattr(iterator, "explain", lambda error: None)(error)
            raise

    return build_with_notes


def _restore_original() -> None:
    """Put the class of Keras back."""
    if Session.original is not None:
        trainer = _trainer_module()
        trainer.JAXEpochIterator = Session.original
        owner, name = build_method()
        setattr(owner, name, getattr(owner, name).__wrapped__)
        Session.original = None


def _trainer_module() -> Any:
    """Return the module of Keras in which its trainer looks up the class of the epoch iterator. See `require_jax` for errors."""
    require_jax("threaded epochs", "train without threaded epochs")
    from keras.src.backend.jax import trainer

    return trainer
