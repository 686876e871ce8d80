"""`data`: whatever `penstock.feed` takes goes in, data for `fit`, `evaluate` and `predict` of Keras comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.data.tree import Batch
from penstock.keras._replace_iterator import enable_for_data

if TYPE_CHECKING:
    from penstock.keras._data_adapter import PenstockDataAdapter


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
      unpack: a function from a batch of `batches` to a batch for Keras, such as `lambda b: (b["image"], b["label"], b["mask"])`.
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
    from penstock.keras._data_adapter import PenstockDataAdapter

    if unpack is not None and not callable(unpack):
        raise TypeError(f"unpack={unpack!r} is not a function from a batch to a batch")
    return PenstockDataAdapter(batches, unpack)
