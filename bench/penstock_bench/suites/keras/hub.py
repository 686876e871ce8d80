"""Convert models of Keras Hub to plain Keras models."""

from __future__ import annotations

from typing import Any

from penstock_bench.suites.keras.keras_setup import keras


def as_keras_model(task: Any) -> Any:
    """Return the layers and weights of a Keras Hub task.

    The task's own `fit` and `predict` take strings, arrays, and data sets of tf.data or Grain, which read ahead by themselves.
    They take no `PyDataset` and no generator, for which users need this plain model.
    """
    return keras.Model(task.input, task.output)
