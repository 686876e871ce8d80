"""With a distribution of Keras, batches are placed where Keras would place them."""

import socket
import subprocess
import sys
import textwrap
from functools import partial

import jax
import keras
import numpy as np
import pytest
from tests.keras.training import BATCH, assert_same, batches, records

import penstock as ps
import penstock.keras as pk
from penstock.keras.batch_iterator import Execution, KerasPlacement
from penstock.keras.versions import Behaviour, behaviour, partial_batches

DEVICES = [f"cpu:{i}" for i in range(8)]


def data_parallel():
    return keras.distribution.DataParallel(devices=DEVICES)


def model_parallel():
    mesh = keras.distribution.DeviceMesh((4, 2), ["batch", "model"], DEVICES)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*dense.*kernel"] = (None, "model")
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def wide(**options):
    model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(4, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", **options)
    return model


@pytest.mark.parametrize(
    ("distribution", "data", "steps"),
    [
        (data_parallel, "arrays", 1),
        (model_parallel, "generator", 2),
        (data_parallel, "loader", 2),
        (model_parallel, "loader", 1),
    ],
)
def test_the_same_training(distribution, data, steps):
    """There are five batches; the last is an execution by itself."""
    x, y = records(40)
    model = partial(wide, steps_per_execution=steps)

    def fit(model, callbacks):
        if data == "arrays":
            return model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
        # With 2 steps in an execution, an epoch of 5 steps takes 6 batches.
        endless = (batch for _ in range(9) for batch in batches(40))
        return model.fit(endless, epochs=2, steps_per_epoch=5, shuffle=False, verbose=0, callbacks=callbacks)

    with distribution().scope():
        if data != "loader":
            assert_same(fit, model)
            return
        keras.utils.set_random_seed(7)
        default = model().fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history
        keras.utils.set_random_seed(7)
        assert model().fit(pk.data(ps.Loader((x, y), BATCH, epochs=1)), verbose=0).history == default


@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_a_last_batch_that_is_shorter_and_still_divides():
    def fit(model, callbacks):
        x, y = records(56)
        data = ((x[i : i + 16], y[i : i + 16]) for i in range(0, 56, 16))
        return model.fit(data, shuffle=False, verbose=0, callbacks=callbacks)

    with data_parallel().scope():
        assert_same(fit, partial(wide, steps_per_execution=2))


def test_stacks_have_the_layout_that_keras_gives_them():
    if not behaviour().stacks:
        with pytest.raises(TypeError, match="one by one"):
            partial_batches([])
        return
    from keras.src.backend.jax.trainer import get_layout

    batch = records(8)
    with model_parallel().scope():
        ready = KerasPlacement(3)(Execution([batch] * 3, None)).batch
        expected = [get_layout(leaf, keras.distribution.distribution(), is_super_batch=True) for leaf in ready.item]
    assert (ready.steps, ready.failure) == (3, None)
    assert [leaf.shape for leaf in ready.item] == [(3, 8, 5), (3, 8)]
    for leaf, sharding in zip(ready.item, expected, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_a_layout_is_worked_out_once_for_each_signature(monkeypatch):
    distribution = data_parallel()
    asked = []

    def get_data_layout(shape):
        asked.append(tuple(shape))
        return type(distribution).get_data_layout(distribution, shape)

    monkeypatch.setattr(distribution, "get_data_layout", get_data_layout)
    with distribution.scope():
        place = KerasPlacement()
    x, y = records(16)
    for _ in range(3):
        placed = place((x, y, None)).batch
        place((x[:8], y[:8], None))
    assert sorted(asked) == [(8,), (8, 5), (16,), (16, 5)]
    assert placed[2] is None
    assert len(placed[0].sharding.device_set) == 8
    np.testing.assert_array_equal(placed[0], x)


def test_without_a_distribution_on_a_cpu_arrays_are_where_this_keras_has_them():
    place = KerasPlacement()
    odd = np.arange(40, dtype="float32")[1:]
    placed = place({"x": odd, "t": np.ones((3, 4)).T, "none": None})
    assert placed.bytes == odd.nbytes + 96
    assert list(placed.batch) == ["x", "t", "none"]
    assert placed.batch["none"] is None
    for name, array in (("x", odd), ("t", np.ones((4, 3)))):
        np.testing.assert_array_equal(placed.batch[name], array)
        assert isinstance(placed.batch[name], jax.Array if behaviour().on_device else np.ndarray)


def test_arrays_that_stay_on_the_host_are_where_the_device_can_use_them(monkeypatch):
    monkeypatch.setattr("penstock.keras.batch_iterator.behaviour", lambda: Behaviour(on_device=False, stacks=False))
    place = KerasPlacement()
    words, odd = np.array(["a", "b"]), np.arange(40, dtype="float32")[1:]
    placed = place({"words": words, "x": odd, "t": np.ones((3, 4)).T})
    np.testing.assert_array_equal(placed.batch["words"], words)
    for name, array in (("x", odd), ("t", np.ones((4, 3)))):
        np.testing.assert_array_equal(placed.batch[name], array)
        assert placed.batch[name].ctypes.data % 64 == 0
        assert placed.batch[name].flags.c_contiguous
    assert place(placed.batch).batch["x"] is placed.batch["x"]


SCRIPT = textwrap.dedent("""
    import os, sys
    os.environ["KERAS_BACKEND"] = "jax"
    import jax
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
    import keras, numpy as np
    import penstock as ps, penstock.keras as pk
    from penstock.keras.versions import behaviour

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 5)).astype("float32"), rng.integers(0, 3, 32)
    loader = ps.Loader((x, y), 8, epochs=1)  # each process reads its half of each batch

    class Mine(keras.utils.PyDataset):
        def __len__(self):
            return len(loader)

        def __getitem__(self, step):
            return loader[step]

    def train(data, threaded, steps):
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(3, "softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=steps)
        if threaded:
            with pk.threaded_epochs():
                return model.fit(data(), epochs=2, shuffle=False, verbose=0).history["loss"]
        return model.fit(data(), epochs=2, shuffle=False, verbose=0).history["loss"]

    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    for steps in (1, 3):  # with 3 steps in an execution, the last of 4 is one by itself
        default = train(Mine, False, steps)
        assert train(Mine, True, steps) == default
        assert train(lambda: pk.data(loader), False, steps) == default

    keras.distribution.set_distribution(keras.distribution.DataParallel())

    class Shared(keras.utils.PyDataset):  # a batch has 4 rows: the part of one process of 8 rows
        def __len__(self):
            return 8

        def __getitem__(self, step):
            return x[step * 4 : step * 4 + 4], y[step * 4 : step * 4 + 4]

    if behaviour().stacks:  # Keras 3.15 refuses it
        for steps in (1, 3):
            default = train(Shared, False, steps)
            assert train(Shared, True, steps) == default
            assert train(lambda: pk.data(loader), False, steps) == default
    print("all right", default)
""")


@pytest.mark.slow
def test_two_processes_give_their_own_rows():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, port, str(p)], stdout=-1, stderr=-1, text=True) for p in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
        assert all("all right" in out for out, _ in outputs), outputs
        assert len({out.rpartition("all right")[2] for out, _ in outputs}) == 1
    finally:
        for process in processes:
            process.kill()
            process.wait()
