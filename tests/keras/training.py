"""A small training that is the same each time, except for the iterator over its data."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from tests.keras.conftest import feeding_threads

import penstock.keras as pk

FEATURES, CLASSES, BATCH = 5, 3, 8
RAN_OUT = pytest.mark.filterwarnings("ignore:.*ran out of data")


def records(count: int = 44, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return (x, y). 44 records give batches of 8, of which the last is shorter."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, FEATURES)).astype("float32"), rng.integers(0, CLASSES, count).astype("int32")


def batches(count: int = 44, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the records in batches."""
    x, y = records(count, seed)
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, count, BATCH)]


def make_model(built: bool = False, **options: Any) -> keras.Model:
    """Return a compiled model whose result depends on the order of batches, by dropout and batch norm.

    Unless it is built, `fit` inspects a batch first.
    """
    layers = [keras.layers.Input((FEATURES,))] if built else []
    model = keras.Sequential(
        [
            *layers,
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3, seed=1),
            keras.layers.Dense(CLASSES, "softmax"),
        ]
    )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", weighted_metrics=["accuracy"], **options)
    return model


def compiled(model: keras.Model) -> keras.Model:
    """Compile a classifier and return it."""
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


class Records(keras.utils.PyDataset):
    """Batches that are reshuffled at the end of each epoch, in place."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.x, self.y = records()
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        here = slice(index * BATCH, (index + 1) * BATCH)
        # Without a copy, the last step of Keras alone would read arrays while they are shuffled.
        return self.x[here].copy(), self.y[here].copy()

    def on_epoch_end(self) -> None:
        order = self.rng.permutation(len(self.x))
        self.x[...], self.y[...] = self.x[order], self.y[order]


class Endless(Records):
    """Batches without end."""

    @property
    def num_batches(self) -> None:
        return None

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return batches(seed=index)[0]


def trained(data: Any, **options: Any) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    """Return the history and the weights of a new model after its `fit`. `data` may be a function that makes the data."""
    keras.utils.set_random_seed(7)
    model = make_model()
    history = model.fit(data() if callable(data) else data, shuffle=False, verbose=0, **options)
    assert not feeding_threads()
    return history.history, [np.asarray(v.value) for v in model.weights]


def assert_equal(ours: tuple[Any, list[np.ndarray]], theirs: tuple[Any, list[np.ndarray]]) -> None:
    """Check that two results of `trained` are equal bit for bit."""
    assert ours[0] == theirs[0]
    for one, other in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_array_equal(one, other)


class Trained(NamedTuple):
    """The result of a training."""

    history: dict[str, list[float]]
    weights: list[np.ndarray]
    ahead: bool  # whether a feed read the training data


def train(threaded: bool, fit: Callable[[keras.Model, Any], Any], model: Callable[[], keras.Model] = make_model) -> Trained:
    """Train a new model. `fit` gets the model and the callbacks for the model's `fit`."""
    keras.utils.set_random_seed(7)
    trained, watch = model(), _Watch()
    with pk.threaded_epochs() if threaded else contextlib.nullcontext() as epochs:
        history = fit(trained, [watch])
    # Batches that are read without a feed have no bytes in the statistics.
    ahead = bool(watch.threads) or (threaded and any(stats.bytes for stats in epochs.stats()))
    return Trained(history.history, [np.asarray(v.value) for v in trained.weights], ahead)


class _Watch(keras.callbacks.Callback):
    """A callback that notes the threads of penstock that run during a step."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.threads |= {one.name for one in threading.enumerate() if one.name.startswith("penstock-")}


def assert_same(
    fit: Callable[[keras.Model, Any], Any], model: Callable[[], keras.Model] = make_model, ahead: bool | None = True
) -> None:
    """Check that a training with threaded epochs is the same as without, bit for bit.

    Args:
      ahead: whether a thread reads the batches; None if their speed decides.
    """
    default, threaded = train(False, fit, model), train(True, fit, model)
    assert not default.ahead
    assert ahead is None or threaded.ahead == ahead
    assert threaded.history == default.history
    for ours, theirs in zip(threaded.weights, default.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
