"""In several processes, `pk.data(loader)` reads the rows that Keras's distribution needs in each, and a checkpoint is of all."""

import pytest
from tests.feed.process_group import run

LOADING = """
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
    (one,) = map(losses, run(LOADING, 1))
    assert len(one) == 6
    assert list(map(losses, run(LOADING, 2))) == [one, one]


SAVING = """
import os
os.environ["KERAS_BACKEND"] = "jax"
import keras
import penstock.keras as pk

keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(64, 32)).astype("f")
y = x[:, :8].argmax(1).astype("int32")
folder = FOLDER

class Breaks(keras.callbacks.Callback):
    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyError("broken")

class Sums(keras.callbacks.Callback):
    sums = np.zeros(2)

    def on_train_batch_end(self, batch, logs=None):
        self.sums = self.sums + [1, logs["loss"]]

    def on_train_end(self, logs=None):
        assert self.sums[0] == 16, self.sums

    def get_state(self):
        return self.sums

    def set_state(self, state):
        self.sums = state

def train(folder, after=0):
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    distribution = pk.AutoShardDistribution()
    with distribution.scope():
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(512, "relu"), keras.layers.Dense(8, "softmax")])
        model.compile("adamw", "sparse_categorical_crossentropy")
        loader = ps.Loader((x, y), batch_size=16, shuffle=True, seed=1)
        callbacks = [pk.Checkpoint(folder, loader, save_freq=3), keras.callbacks.EarlyStopping("loss", patience=9), Sums()]
        try:
            return model.fit(pk.data(loader), epochs=4, verbose=0, callbacks=[*callbacks, Breaks(after)]).history["loss"]
        except KeyError:
            return None

unbroken = train(folder + "/a")
assert train(folder + "/b", 6) is None
assert train(folder + "/b", 5) is None
broken = train(folder + "/b")
assert broken == unbroken, (broken, unbroken)
print("losses", [float(f"{loss:.4g}") for loss in broken])
"""


@pytest.mark.slow
def test_several_processes_save_and_continue_together(tmp_path):
    script = SAVING.replace("FOLDER", repr(str(tmp_path)))
    first, second = ([line for line in out.splitlines() if line.startswith("losses")] for out in run(script, 2))
    assert first == second
    assert first
