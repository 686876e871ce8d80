"""Train a few dense layers: with a slow source, where threaded epochs help, and with a fast one, which shows their overhead."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from penstock_bench.suites.keras.batches import Batches
from penstock_bench.suites.keras.keras_setup import SEED, keras
from penstock_bench.suites.keras.task import Job, Size

_LATENCY = 5e-3  # seconds that storage takes for a batch
_WIDTH = 512  # on two cores, a step at batch 224 takes about as long as the storage takes for a batch

_FEATURES = 16


def slow_job(size: Size) -> Job:
    rng = np.random.default_rng(SEED)
    records = rng.standard_normal((8 * size.batch, _WIDTH), np.float32)
    labels = rng.standard_normal((8 * size.batch, 1), np.float32)

    def make(number: int) -> Any:
        time.sleep(_LATENCY)
        chosen = slice(number % 8 * size.batch, (number % 8 + 1) * size.batch)
        return records[chosen], labels[chosen]

    layers = [keras.layers.Dense(_WIDTH, activation="relu") for _ in range(2)]
    batches = Batches(size.steps, make)
    return Job(_compiled([*layers, keras.layers.Dense(1)], _WIDTH), {"x": batches}, batches)


def arrays_job(size: Size) -> Job:
    rng = np.random.default_rng(SEED)
    x = rng.standard_normal((size.steps * size.batch, _FEATURES), np.float32)
    y = rng.standard_normal((size.steps * size.batch, 1), np.float32)
    return Job(_compiled([keras.layers.Dense(1)], _FEATURES), {"x": x, "y": y, "batch_size": size.batch})


def _compiled(layers: list[Any], features: int) -> Any:
    model = keras.Sequential([keras.Input((features,)), *layers])
    model.compile(optimizer=keras.optimizers.SGD(1e-3), loss="mse", jit_compile=True)
    return model
