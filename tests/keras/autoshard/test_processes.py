"""A model that is planned by several processes trains as in one."""

import json

import numpy as np
import pytest
from tests.feed.process_group import run

SCRIPT = """
import os
os.environ["KERAS_BACKEND"] = "jax"
import keras
import penstock.keras as pk

keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(64, 32)).astype("f")
y = x[:, :8].argmax(1).astype("int32")
for memory in (None, "1MiB"):
    distribution = pk.AutoShardDistribution(memory=memory)
    with distribution.scope():
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(512, "relu"), keras.layers.BatchNormalization()])
        model.add(keras.layers.Dense(512, "relu"))
        model.add(keras.layers.Dense(8, "softmax"))
        model.compile("adamw", "sparse_categorical_crossentropy")
        loader = pk.data(ps.Loader((x, y), batch_size=16, shuffle=True, seed=1))
        losses = model.fit(loader, epochs=2, verbose=0, validation_data=pk.data(ps.Loader((x, y), batch_size=16))).history
        print("losses", [loss for name in ("loss", "val_loss") for loss in losses[name]])
"""


def losses(out):
    return [
        json.loads(line.removeprefix("losses")) for line in out.splitlines() if line.startswith("losses")
    ]  # not those of gloo


@pytest.mark.slow
def test_losses_are_those_of_one_process():
    (one,) = map(losses, run(SCRIPT, 1))
    assert len(one) == 2
    for process in map(losses, run(SCRIPT, 2)):
        np.testing.assert_allclose(process, one, rtol=1e-3)  # sums are added in another order, over 8 steps
