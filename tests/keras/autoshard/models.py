"""Models of each kind that Keras has, and the comparison of a training under a plan with one on a single device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
from keras import layers

import penstock.keras as pk

FEATURES, CLASSES, BATCH = 32, 8, 16


def records(count: int = 64, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return x [count, FEATURES] and classes [count]."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, FEATURES)).astype("float32")
    return x, x[:, :CLASSES].argmax(1).astype("int32")


def compiled(model: Any, **options: Any) -> Any:
    """Compile a classifier and return it."""
    options.setdefault("optimizer", keras.optimizers.AdamW(1e-2))
    model.compile(loss="sparse_categorical_crossentropy", **options)
    return model


def sequential(**options: Any) -> Any:
    """A classifier with non-trainable state: moving averages and the seeds of dropout."""
    return compiled(
        keras.Sequential(
            [
                layers.Dense(64, "relu"),
                layers.BatchNormalization(),
                layers.Dropout(0.2, seed=1),
                layers.Dense(CLASSES, "softmax"),
            ]
        ),
        metrics=["accuracy"],
        **options,
    )


def functional() -> Any:
    """A model with two inputs, and two outputs of different losses."""
    left, right = keras.Input((FEATURES,), name="left"), keras.Input((FEATURES,), name="right")
    hidden = layers.Add()([layers.Dense(64, "relu")(left), layers.Dense(64, "relu")(right)])
    outputs = {"kind": layers.Dense(CLASSES, "softmax", name="kind")(hidden), "size": layers.Dense(1, name="size")(hidden)}
    model = keras.Model({"left": left, "right": right}, outputs)
    model.compile("adam", {"kind": "sparse_categorical_crossentropy", "size": "mse"}, loss_weights={"kind": 1.0, "size": 0.5})
    return model


class Subclassed(keras.Model):
    """A model whose layers are built by the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(64, "gelu")
        self.norm = layers.LayerNormalization()
        self.head = layers.Dense(CLASSES, "softmax")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.norm(self.hidden(x)))


class OwnStep(Subclassed):
    """A model with a training step of its own, which weighs the loss."""

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, optimizer, metrics = state
        x, y = data

        def loss(trainable: Any) -> Any:
            outputs, new = self.stateless_call(trainable, non_trainable, x, training=True)
            return 2 * keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, outputs)), new

        (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": value}, (trainable, new, optimizer, metrics)


def history(build: Callable[[], Any], fit: Callable[[Any], Any], distribution: Any = None) -> dict[str, list[float]]:
    """Return the losses and metrics of a training, from fixed seeds."""
    keras.utils.set_random_seed(7)
    with contextlib.nullcontext() if distribution is None else distribution.scope():
        found: dict[str, list[float]] = fit(build()).history
    return found


def assert_trains_as_on_one_device(
    build: Callable[[], Any], fit: Callable[[Any], Any], rtol: float = 1e-4, **options: Any
) -> Any:
    """Check that a training under a plan has the losses and metrics of one without, and return the distribution."""
    distribution = pk.AutoShardDistribution(**options)
    alone, planned = history(build, fit), history(build, fit, distribution)
    assert alone.keys() == planned.keys()
    for name, values in alone.items():
        np.testing.assert_allclose(planned[name], values, rtol=rtol, err_msg=name)
    assert "train" in distribution.plans
    return distribution


def shards(variable: Any) -> int:
    """Return the number of parts into which a variable is sharded."""
    value = variable.value
    return int(np.prod(value.shape)) // int(np.prod(value.sharding.shard_shape(value.shape)))
