"""`pk.data(loader)` in several processes reads the rows that Keras's distribution needs in each."""

import pytest
from tests.feed.process_group import run

SCRIPT = """
import os
os.environ["KERAS_BACKEND"] = "jax"
import keras
import penstock.keras as pk

x, y = np.random.default_rng(0).normal(size=(64, 8)).astype("f"), np.arange(64, dtype="f")
for shape in ((1, 8), (2, 4), (8, 1)):
    for steps in (1, 2):
        keras.distribution.set_distribution(None)
        keras.backend.clear_session()
        mesh = keras.distribution.DeviceMesh(shape, ("batch", "model"))
        layouts = keras.distribution.LayoutMap(mesh)
        layouts["dense.*kernel"] = (None, "model")
        distribution = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch", auto_shard_dataset=False)
        with distribution.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(8)])
            model.compile("sgd", "mse", steps_per_execution=steps)
            loader = ps.Loader((x, np.tile(y[:, None], 8)), 16, shuffle=True, seed=3, epochs=1)
            losses = model.fit(pk.data(loader), epochs=2, verbose=0).history["loss"]
        print(shape, steps, [float(f"{loss:.4g}") for loss in losses])
"""


def losses(out):
    return [line for line in out.splitlines() if line.startswith("(")]  # not the lines of gloo


@pytest.mark.slow
def test_losses_are_those_of_one_process_whatever_the_distribution():
    (one,) = map(losses, run(SCRIPT, 1))
    assert len(one) == 6
    assert list(map(losses, run(SCRIPT, 2))) == [one, one]
