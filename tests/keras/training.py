"""A small training, the same each time but for what iterates over its data."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

import penstock.keras as pk

FEATURES, CLASSES, BATCH = 5, 3, 8


def records(count: int = 44, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The last batch of 8 is a shorter one."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, FEATURES)).astype("float32"), rng.integers(0, CLASSES, count).astype("int32")


def batches(count: int = 44, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    x, y = records(count, seed)
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, count, BATCH)]


def make_model(built: bool = False, **options: Any) -> keras.Model:
    """Not built, so that `fit` looks at a batch first, unless `built`; dropout and batch norm tell the order of batches."""
    layers = [keras.layers.Input((FEATURES,))] if built else []
    model = keras.Sequential(
        [
            *layers,
            keras.layers.Dense(4, "relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3, seed=1),
            keras.layers.Dense(CLASSES, "softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"], **options)
    return model


class Trained(NamedTuple):
    history: dict[str, list[float]]
    weights: list[np.ndarray]
    ahead: bool  # whether a feed read the training data


def train(threaded: bool, fit: Callable[[keras.Model, Any], Any], model: Callable[[], keras.Model] = make_model) -> Trained:
    """`fit` gets a model and the callbacks to give to its `fit`."""
    keras.utils.set_random_seed(7)
    trained, watch = model(), _Watch()
    with pk.threaded_epochs() if threaded else contextlib.nullcontext() as epochs:
        history = fit(trained, [watch])
    # Batches that are taken without a feed have no bytes in the statistics.
    ahead = bool(watch.threads) or (threaded and any(stats.bytes for stats in epochs.stats()))
    return Trained(history.history, [np.asarray(v.value) for v in trained.weights], ahead)


class _Watch(keras.callbacks.Callback):
    """Sees the threads that run during a step."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.threads |= {one.name for one in threading.enumerate() if one.name.startswith("penstock-")}


def assert_same(
    fit: Callable[[keras.Model, Any], Any], model: Callable[[], keras.Model] = make_model, ahead: bool | None = True
) -> None:
    """Bit for bit the same training with threaded epochs as without; `ahead`: on a thread, None where speed decides."""
    default, threaded = train(False, fit, model), train(True, fit, model)
    assert not default.ahead
    assert ahead is None or threaded.ahead == ahead
    assert threaded.history == default.history
    for ours, theirs in zip(threaded.weights, default.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
