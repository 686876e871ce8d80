"""The `model.fit` that is broken: `python -m penstock_bench.faults.keras_training FOLDER` trains, or continues, to its end.

As in `training`, a table in the model has the numbers of the records of each step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np

import penstock as ps
import penstock.keras as pk
from penstock._atomic_write import replace
from penstock_bench.faults.training import BATCH, INPUTS, RESULT, STEPS, loader

HIDDEN = 256
STEPS_PER_EPOCH = 20


class Autoencoder(keras.Model):  # type: ignore[misc]  # Keras has no types
    """An autoencoder with dropout and moving averages, which writes down the numbers of the records that it is trained with."""

    def __init__(self) -> None:
        super().__init__()
        nothing = lambda shape, dtype: -np.ones(shape, dtype)  # noqa: E731 - an initializer of Keras
        self.seen = self.add_weight(shape=(STEPS, BATCH), dtype="int32", initializer=nothing, trainable=False, name="seen")
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="count")
        self.encode = keras.layers.Dense(HIDDEN, "tanh")
        self.normalise = keras.layers.BatchNormalization()
        self.drop = keras.layers.Dropout(0.1)
        self.decode = keras.layers.Dense(INPUTS)

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Return the reconstruction [B, INPUTS]."""
        if training:
            self.seen.assign(self.seen.value.at[self.count.value].set(inputs["id"]))
            self.count.assign(self.count.value + 1)
        return self.decode(self.drop(self.normalise(self.encode(inputs["x"]))))


class Tell(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Print which part of the run has begun, for whoever breaks it."""

    def on_train_begin(self, logs: Any = None) -> None:
        print("begin", flush=True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        print("train", batch, flush=True)

    def on_train_end(self, logs: Any = None) -> None:
        print("end", flush=True)


def main() -> int:
    """Train to the end, and write the result: digests of all variables and of the history, and the records."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps-per-execution", type=int, default=1)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices)
    keras.utils.set_random_seed(1)
    model = Autoencoder()
    model.compile("adam", "mse", metrics=["mae"], steps_per_execution=args.steps_per_execution)
    data = loader()
    x = np.random.default_rng(1).normal(size=(32, INPUTS)).astype(np.float32)
    callbacks = [
        keras.callbacks.ReduceLROnPlateau(factor=0.7, patience=0, min_delta=0.5),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        pk.Checkpoint(args.folder, data, save_freq=6, best="min val_loss"),
        Tell(),
    ]
    history = model.fit(
        pk.data(data, unpack=lambda batch: (batch, batch["x"])),
        epochs=STEPS // STEPS_PER_EPOCH,
        steps_per_epoch=STEPS_PER_EPOCH,
        validation_data=pk.data(ps.Loader(({"x": x, "id": np.arange(32, dtype=np.int32)}, x), BATCH, epochs=1)),
        callbacks=callbacks,
        verbose=0,
    ).history
    arrays = {variable.path: np.asarray(variable.value) for variable in [*model.variables, *model.optimizer.variables]}
    digests = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}
    digests["history"] = json.dumps(history, sort_keys=True)
    np.savez(args.folder / "result.npz", seen=np.asarray(model.seen.value))
    replace(args.folder / RESULT, json.dumps({"step": int(np.asarray(model.count.value)), "digests": digests}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
