"""Whatever cannot be planned is refused with words that say what to do, and no weights are lost."""

import subprocess
import sys

import jax
import keras
import numpy as np
import pytest
from keras import layers
from tests.extras import require
from tests.keras.autoshard.models import BATCH, CLASSES, FEATURES, compiled, records, sequential

import penstock as ps
import penstock.keras as pk

# Keras's conversion of a variable to NumPy
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def fit(model, count=64, **options):
    x, y = records(count)
    return model.fit(x, y, shuffle=False, verbose=0, **{"batch_size": BATCH, **options})


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_another_backend(backend):
    require(backend)
    script = f"import os; os.environ['KERAS_BACKEND'] = {backend!r}\nimport penstock.keras as pk\npk.AutoShardDistribution()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert f"Keras runs on the backend '{backend}'" in done.stderr
    assert "set KERAS_BACKEND=jax" in done.stderr


@pytest.mark.slow
def test_nnx_variables():
    script = (
        "import os; os.environ['KERAS_BACKEND'] = 'jax'; os.environ['KERAS_NNX_ENABLED'] = '1'\n"
        "import penstock.keras as pk\npk.AutoShardDistribution()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert "RuntimeError: Keras was started with KERAS_NNX_ENABLED" in done.stderr


def test_another_distribution_is_active():
    distribution = pk.AutoShardDistribution()
    with keras.distribution.DataParallel().scope():
        with pytest.raises(RuntimeError, match=r"DataParallel.*set_distribution\(None\)"):
            with distribution.scope():
                pass
        with pytest.raises(RuntimeError, match="DataParallel"):
            distribution.plan(sequential, records(BATCH))
        with pytest.raises(RuntimeError, match="DataParallel"):
            distribution.shard(sequential(), records(BATCH))
    with distribution.scope(), distribution.scope():
        assert keras.distribution.distribution() is distribution


def test_no_sample():
    distribution = pk.AutoShardDistribution()
    with pytest.raises(ValueError, match=r"no sample.*plan\(build, \(x, y\)\)"):
        distribution.plan(sequential)
    with pytest.raises(ValueError, match=r"no sample.*shard\(model, \(x, y\)\)"):
        distribution.shard(sequential())


@pytest.mark.slow
def test_a_model_that_is_too_large():
    distribution = pk.AutoShardDistribution(memory="10KiB")
    x, y = records(BATCH)
    with pytest.raises(ps.PlanError, match=r"sequential.*kernel"):
        distribution.plan(sequential, (x, y))
    with distribution.scope():
        model = sequential()
        model.build((None, FEATURES))
        weights = model.get_weights()
        with pytest.raises(ps.PlanError, match=r"sequential.*kernel"):
            fit(model)
        for before, after in zip(weights, model.get_weights(), strict=True):
            np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(("rows", "sizes"), [(10, "8 or 16"), (7, "8")])
def test_rows_that_do_not_divide(rows, sizes):
    with pk.AutoShardDistribution().scope():
        with pytest.raises(ValueError, match=rf"{rows} rows.*8 devices: take a batch size of {sizes}\."):
            fit(sequential(), rows, batch_size=rows)


@pytest.mark.slow
def test_rows_that_do_not_divide_after_a_plan():
    distribution = pk.AutoShardDistribution()
    distribution.plan(sequential, records(32))
    with distribution.scope(), pytest.raises(ValueError, match="take a batch size of 8 or 16"):
        fit(sequential(), batch_size=10)


def test_rows_that_do_not_divide_in_a_plan_from_shapes():
    distribution = pk.AutoShardDistribution()
    with pytest.raises(ValueError, match=r"the batch has 10 rows.*take a batch size of 8 or 16"):
        distribution.plan(sequential, records(10))
    with pytest.raises(ValueError, match=r"the batch has 10 rows.*take a batch size of 8 or 16"):
        distribution.shard(sequential(), records(10))


@pytest.mark.slow
def test_a_leaf_that_has_no_rows():
    """Most of the leaves have the rows of the batch."""

    def build():
        inputs = {"a": keras.Input((5,), name="a"), "x": keras.Input((FEATURES,), name="x")}
        hidden = layers.Dense(16)(inputs["x"]) + keras.ops.mean(inputs["a"])
        return compiled(keras.Model(inputs, layers.Dense(CLASSES, "softmax")(hidden)))

    x, y = records(BATCH)
    with pk.AutoShardDistribution().scope():
        build().train_on_batch({"a": np.ones((11, 5), "float32"), "x": x}, y)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
def test_fewer_rows_than_devices(rows):
    with pk.AutoShardDistribution().scope(), pytest.warns(UserWarning, match="nearest size .* 8"):
        fit(sequential(), 8, batch_size=rows)


class Keeps(layers.Layer):
    """A layer that keeps a tensor of a training step for the next."""

    kept = None

    def call(self, x, training=False):
        out = x + Keeps.kept if training and Keeps.kept is not None else x
        if training:
            Keeps.kept = keras.ops.mean(x)
        return out


class Reads(layers.Layer):
    """A layer that needs the values of a tensor."""

    def call(self, x, training=False):
        return x * float(keras.ops.mean(x)) if training else x


class Counts(layers.Layer):
    """A layer that counts its calls in Python, which is harmless."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return x


def with_layer(layer):
    return compiled(keras.Sequential([keras.Input((FEATURES,)), layers.Dense(16), layer, layers.Dense(CLASSES, "softmax")]))


def test_a_layer_that_keeps_a_tensor():
    with pk.AutoShardDistribution().scope():
        with pytest.raises(TypeError, match=r"keeps a tensor.*add_weight"):
            fit(with_layer(Keeps()), 20)  # the smaller last batch is traced too


def test_a_layer_that_reads_values():
    with pk.AutoShardDistribution().scope():
        with pytest.raises(TypeError, match="needs the values of a tensor in Python"):
            fit(with_layer(Reads()))


def test_a_layer_that_counts_its_calls():
    with pk.AutoShardDistribution().scope():
        fit(with_layer(Counts()))


def test_a_build_that_needs_values():
    def build():
        model = sequential()
        model.build((None, FEATURES))
        np.asarray(model.layers[0].kernel.value)
        return model

    with pytest.raises(TypeError, match=r"build\(\).*values.*in scope\(\)"):
        pk.AutoShardDistribution().plan(build, records(BATCH))


def test_a_build_that_returns_no_model():
    with pytest.raises(TypeError, match=r"build\(\) returned Dense.*keras.Model"):
        pk.AutoShardDistribution().plan(lambda: layers.Dense(3), records(BATCH))


def test_a_model_that_changes_after_it_was_planned():
    """With LoRA, other variables are trained: the new step is planned, and the old optimizer is told."""
    inputs = keras.Input((FEATURES,))
    hidden = layers.Dense(16)
    model = compiled(keras.Model(inputs, layers.Dense(CLASSES, "softmax")(hidden(inputs))))
    distribution = pk.AutoShardDistribution()
    with distribution.scope():
        fit(model)
        first = distribution.plans["train"]
        hidden.enable_lora(2)
        with pytest.raises(Exception) as caught:  # noqa: PT011  Keras's own error
            fit(model)
        assert any("compile it again" in note for note in getattr(caught.value, "__notes__", ()))
        compiled(model)
        fit(model)
    assert distribution.plans["train"] is not first
    assert any("lora" in leaf.path for leaf in distribution.plans["train"].inputs)


@pytest.mark.parametrize("option", ["run_eagerly=True", "jit_compile=False"])
def test_an_eager_model(option):
    name, _, value = option.partition("=")
    with pk.AutoShardDistribution().scope():
        with pytest.raises(ValueError, match=f"compiled with {option}"):
            fit(sequential(**{name: value == "True"}), 16)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device_mesh": (2, 4)}, TypeError, "device_mesh.*tuple.*DeviceMesh"),
        ({"devices": 8}, TypeError, "devices=8.*list"),
        ({"devices": []}, ValueError, "devices is empty"),
        ({"devices": ["cpu:99"]}, ValueError, r"'cpu:99'.*'cpu:0', "),
        ({"devices": ["cpu"]}, ValueError, "there is no device 'cpu'"),
        ({"devices": ["npu:0"]}, ValueError, "'npu:0'.*'cpu:0', "),
        ({"devices": ["cpu:1", "cpu:1"]}, ValueError, "devices has .* twice"),
        ({"devices": [2, 4]}, TypeError, r"devices=\[2, 4\].*list"),
        ({"devices": {"cpu:0"}}, TypeError, "list of devices"),
        ({"check": 5}, TypeError, "check=5.*True, False, None"),
        ({"check": "v99:2x4"}, ValueError, "v99:2x4"),
        ({"layout_map": {}}, TypeError, "layout_map.*dict"),
        ({"hardware": "tpu-v99"}, ValueError, "tpu-v99"),
        ({"memory": "lots"}, ValueError, "lots"),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        pk.AutoShardDistribution(**options)


def test_a_layer_that_keras_does_not_compile():
    model = compiled(keras.Sequential([layers.RandomRotation(0.1), layers.Flatten(), layers.Dense(CLASSES, "softmax")]))
    with pk.AutoShardDistribution().scope():
        with pytest.raises(ValueError, match=r"the layers 'random_rotation.*supports_jit=False.*dataset\.map"):
            model.fit(np.ones((16, 4, 4, 3), "float32"), np.zeros(16, "int32"), verbose=0)


def test_mesh_and_devices():
    mesh = keras.distribution.DeviceMesh((8,), ["data"])
    with pytest.raises(ValueError, match="give either device_mesh or devices"):
        pk.AutoShardDistribution(mesh, devices=jax.devices())


def test_nothing_is_planned_yet():
    distribution = pk.AutoShardDistribution()
    with pytest.raises(ValueError, match="nothing is planned yet: train a model"):
        distribution.explain()
    with pytest.raises(ValueError, match="nothing is planned yet"):
        distribution.layout_map()


@pytest.mark.parametrize(
    ("sample", "error", "message"),
    [
        (("x", "y"), TypeError, "a batch has a leaf of type str"),
        ((keras.KerasTensor((None, FEATURES)),), ValueError, r"leaf of shape \(None, 32\): replace None by a number"),
        (records(0), ValueError, r"the sample has no rows, but an array of shape \(0, 32\)"),
    ],
)
def test_a_sample_that_is_no_batch(sample, error, message):
    with pytest.raises(error, match=message):
        pk.AutoShardDistribution().plan(sequential, sample)


def test_a_model_where_a_function_is_needed():
    with pytest.raises(TypeError, match=r"build is a model, and a function.*shard\(model, \(x, y\)\)"):
        pk.AutoShardDistribution().plan(sequential(), records(BATCH))
    with pytest.raises(TypeError, match="build=5 is not a function that returns a model"):
        pk.AutoShardDistribution().plan(5, records(BATCH))


def test_a_function_where_a_model_is_needed():
    with pytest.raises(TypeError, match=r"model is of type function.*plan\(build, \(x, y\)\)"):
        pk.AutoShardDistribution().shard(sequential, records(BATCH))
    with pytest.raises(TypeError, match=r"model is of type NoneType, and a keras\.Model is needed$"):
        pk.AutoShardDistribution().shard(None, records(BATCH))


def test_a_layout_map_that_does_not_fit():
    layout_map = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((8,), ["data"]))
    layout_map[".*kernel"] = ("data", None, None)
    with pytest.raises(ValueError, match="kernel") as caught:
        pk.AutoShardDistribution(layout_map=layout_map).plan(sequential, records(BATCH))
    assert any("layouts of the layout_map" in note for note in caught.value.__notes__)


def test_an_operation_is_described_by_the_layer_that_makes_it():
    """As in the activations that an error about memory lists."""
    from penstock.shard.trace.source_lines import describe_source

    def build():
        return compiled(keras.Sequential([layers.Dense(16, name="up"), layers.Dense(CLASSES, "softmax", name="down")]))

    plan = pk.AutoShardDistribution().plan(build, records(BATCH))
    lines = {describe_source([equation.source_info]) for equation in plan.traced.closed.jaxpr.eqns}
    assert not any("_model_step" in line for line in lines)
    if not keras.__version__.startswith("3.16"):  # whose layers give their operations no names
        assert any(line.endswith(", in 'sequential/up'") or line.endswith(", in 'up'") for line in lines)
