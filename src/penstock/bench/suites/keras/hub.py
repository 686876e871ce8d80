"""Make Keras models of Keras Hub's."""

from __future__ import annotations

from typing import Any

from penstock.bench.suites.keras.keras_setup import keras


def as_keras_model(task: Any) -> Any:
    """Return the layers and weights of a Keras Hub task.

    Its own `fit` and `predict` take strings and arrays, and data sets of tf.data or Grain, which read ahead by themselves, but no
    `PyDataset` and no generator. Who has one of those makes this of the task.
    """
    return keras.Model(task.input, task.output)
