"""data(): batches of penstock as Keras data."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.data.tree import Batch
from penstock.keras._replace_iterator import enable_for_data

if TYPE_CHECKING:
    from penstock.keras._data_adapter import PenstockDataAdapter


def data(batches: Any, *, unpack: Callable[[Batch], Any] | None = None) -> PenstockDataAdapter:
    """Batches for `fit`, `evaluate` and `predict` of Keras on JAX, made and placed ahead of time.

    - A finite `Loader` is one epoch, from its start each time. One with `epochs=None` goes on: each epoch of Keras is one of
      its epochs, in an order of its own, or `steps_per_epoch` batches.
    - An iterable (a list, a Grain dataset, a torch `DataLoader`, a `tf.data.Dataset`) is one epoch, from its start each time.
    - An iterator or generator goes on, and needs `steps_per_epoch` for more than one epoch.
    - A `Feed` is taken as it is, its batches where its `to` put them; you close it.

    `class_weight` and `steps_per_epoch` are arguments of `fit`, as ever. Losses and weights are those that Keras's own
    iterator would give for the same batches.

    Args:
      batches: whatever `penstock.feed` takes, of batches (x,), (x, y), (x, y, sample_weight), or of x alone (an array, or a
        dict by the names of the model's inputs); arrays [B, ...]. In several processes, each process's own rows.
      unpack: from a batch, as it was made, to one that Keras takes, such as
        `lambda b: (b["image"], b["label"], b["mask"])`; on the thread that places.

    Returns:
      A `DataAdapter` of Keras, for `x` or `validation_data`. Its `stats()` tell where the time went.

    Raises:
      TypeError, ValueError: `batches` cannot be fed.
      UnsupportedVersionError, RuntimeError: as `enable_threaded_epochs`.

    Example:
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
        raise TypeError(f"unpack={unpack!r} is no function from a batch to a batch")
    return PenstockDataAdapter(batches, unpack)
