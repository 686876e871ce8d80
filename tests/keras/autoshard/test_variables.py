"""Variables are created, loaded and planned in shards: none is ever whole on one device."""

import gc

import jax
import keras
import numpy as np
import pytest
from keras import layers
from tests.keras.autoshard.models import BATCH, CLASSES, FEATURES, compiled, records, sequential, shards
from tests.shard.limits import AT_HAND

import penstock.keras as pk
from penstock.keras.variables import ProvisionalLayouts, create

# Keras's conversion of a variable to NumPy
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
WIDE = 512


def wide():
    """A model with a memory that only sharded variables fit."""
    inputs = keras.Input((FEATURES,))
    hidden = layers.Dense(WIDE, "relu", name="first")(inputs)
    hidden = layers.Dense(WIDE, "relu", name="second")(hidden)
    return compiled(keras.Model(inputs, layers.Dense(CLASSES, "softmax", name="last")(hidden)))


def new_arrays(before):
    """Return the arrays that live and did not before; the list keeps those, so that no new one has the identity of an old one."""
    old = {id(each) for each in before}
    return [each for each in jax.live_arrays() if id(each) not in old]


class Traced(keras.initializers.RandomNormal):
    """An initializer that notes whether it created an array outside of a trace."""

    eager = 0

    def __call__(self, shape, dtype=None):
        value = super().__call__(shape, dtype)
        Traced.eager += not isinstance(value, jax.core.Tracer)
        return value


def test_a_variable_is_created_in_shards():
    Traced.eager = 0
    with pk.AutoShardDistribution().scope():
        layer = layers.Dense(WIDE, kernel_initializer=Traced(seed=1))
        layer.build((None, FEATURES))
    assert Traced.eager == 0
    assert shards(layer.kernel) == 8
    assert shards(layer.bias) == 8
    alone = keras.initializers.RandomNormal(seed=1)((FEATURES, WIDE))
    np.testing.assert_allclose(layer.kernel.value, alone, rtol=1e-6)  # not bit for bit in JAX 0.10, whose fusions differ


@pytest.mark.parametrize(
    "shape",
    [(32, 3), (12, 6), (6, 2, 10), (1, 64), (9, 15), (), (0, 8)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_a_provisional_layout_divides_its_shape(shape):
    layout = ProvisionalLayouts(jax.devices()).of(shape).backend_layout
    shard = layout.shard_shape(shape)
    parts = [size // part for size, part in zip(shape, shard, strict=True) if part]
    assert np.prod(parts, dtype=int) <= 8
    assert all(size == part * count for size, part, count in zip(shape, shard, parts, strict=False) if size)
    if np.prod(shape) % 8 == 0 and np.prod(shape) >= 64:
        assert np.prod(parts) == 8


def test_an_initializer_that_draws_from_a_generator_changes_it():
    layout = ProvisionalLayouts(jax.devices()).of((8, 16)).backend_layout
    seeds = keras.random.SeedGenerator(3)
    initializer = keras.initializers.RandomNormal(seed=seeds)
    first, second = (np.asarray(create(initializer, (8, 16), "float32", layout)) for _ in range(2))
    assert not np.array_equal(first, second)
    assert not isinstance(seeds.state.value, jax.core.Tracer)


def test_an_initializer_that_uses_numpy():
    layout = ProvisionalLayouts(jax.devices()).of((8, 16)).backend_layout
    value = create(lambda shape, dtype: np.full(shape, 2, dtype), (8, 16), "float32", layout)
    assert value.sharding.shard_shape((8, 16)) != (8, 16)
    np.testing.assert_array_equal(value, np.full((8, 16), 2))


def test_a_host_array_is_assigned_in_shards():
    with pk.AutoShardDistribution().scope():
        layer = layers.Dense(WIDE)
        layer.build((None, FEATURES))
        before = jax.live_arrays()
        layer.kernel.assign(np.ones((FEATURES, WIDE)))
        new = new_arrays(before)
    assert layer.kernel.value.dtype == "float32"
    assert [each.sharding.shard_shape(each.shape) for each in new] == [layer.kernel.value.sharding.shard_shape((FEATURES, WIDE))]


def test_a_variable_of_an_array():
    with pk.AutoShardDistribution().scope():
        variable = keras.Variable(np.arange(64))
    assert variable.dtype == "int32"
    assert shards(variable) == 8


def test_a_limit_of_memory_shards_the_model_and_its_optimizer():
    x, y = records()
    distribution = pk.AutoShardDistribution(memory="1MiB")
    with distribution.scope():
        model = wide()
        model.fit(x, y, batch_size=BATCH, verbose=0)
    variables = [*model.variables, *model.optimizer.variables]
    total = sum(each.value.nbytes for each in variables)
    held = sum(each.value.addressable_shards[0].data.nbytes for each in variables)
    assert held <= 1.15 * total / 8


def test_no_array_is_left_in_another_layout():
    """After the first step, all values of variables have the layouts of the plan, and nothing else of their size lives."""
    x, y = records()
    others = jax.live_arrays()
    with pk.AutoShardDistribution(memory="1MiB").scope():
        model = wide()
        model.fit(x, y, batch_size=BATCH, verbose=0)
    kernel = model.get_layer("second").kernel
    gc.collect()
    large = [each for each in new_arrays(others) if each.shape == kernel.shape]
    assert len(large) == 3  # the kernel, and two moments
    assert all(each.sharding.shard_shape(each.shape) != each.shape for each in large)


@pytest.mark.slow
def test_a_plan_from_shapes_allocates_nothing_and_gives_variables_their_layouts():
    distribution = pk.AutoShardDistribution(memory="1MiB")
    gc.collect()
    before = len(jax.live_arrays())
    x, y = records(BATCH)
    keras.utils.set_random_seed(2)
    plan = distribution.plan(wide, (x, y))
    gc.collect()
    assert len(jax.live_arrays()) <= before + 2  # scalars of the optimizer
    with distribution.scope():
        model = wide()
    layouts = {leaf.path: leaf.partition_spec for leaf in plan.inputs}
    for variable in model.variables:
        assert variable.value.sharding.spec == layouts[f"trainable/{variable.path}"]
    keras.utils.set_random_seed(2)
    np.testing.assert_array_equal(model.get_weights()[0], wide().get_weights()[0])
    with distribution.scope():
        model.fit(*records(), batch_size=BATCH, verbose=0)
    assert distribution.plans["train"] is plan  # an equal step is planned once


def test_shard_moves_a_model_that_exists():
    x, y = records()
    model = wide()
    weights = model.get_weights()
    distribution = pk.AutoShardDistribution(memory="1MiB")
    plan = distribution.shard(model, (x[:BATCH], y[:BATCH]))
    assert shards(model.get_layer("second").kernel) == 8
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)
    with distribution.scope():
        model.fit(x, y, batch_size=BATCH, verbose=0)
    assert distribution.plans["train"] is plan


@pytest.mark.slow
def test_a_model_made_outside_of_the_scope_trains_inside():
    x, y = records()
    model = sequential()
    model.predict(x, verbose=0)
    with pk.AutoShardDistribution().scope():
        model.fit(x, y, batch_size=BATCH, verbose=0)
    assert len(model.layers[0].kernel.value.sharding.device_set) == 8


@pytest.mark.slow
def test_a_second_fit_plans_nothing(monkeypatch):
    from penstock.keras import autoshard

    planned = []
    original = autoshard.plan_traced
    monkeypatch.setattr(autoshard, "plan_traced", lambda *args: planned.append(1) or original(*args))
    x, y = records(70)
    with pk.AutoShardDistribution().scope():
        model = sequential()
        model.fit(x, y, batch_size=BATCH, verbose=0)
        model.fit(x, y, batch_size=BATCH, verbose=0)
        model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(x, y, batch_size=BATCH, verbose=0)
        assert len(planned) == 2
        model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(x, y, batch_size=BATCH, verbose=0)
    assert len(planned) == 2


@pytest.mark.slow
def test_a_layout_map_reproduces_the_plan():
    x, y = records()
    distribution = pk.AutoShardDistribution(keras.distribution.DeviceMesh((2, 4), ["data", "model"]), memory="1MiB")
    with distribution.scope():
        model = wide()
        model.fit(x, y, batch_size=BATCH, verbose=0)
    layouts = distribution.layout_map()
    keras.backend.clear_session()
    with keras.distribution.ModelParallel(layout_map=layouts).scope():
        same = wide()
        same.fit(x, y, batch_size=BATCH, verbose=0)
    for ours, theirs in zip(model.variables, same.variables, strict=True):
        assert ours.path == theirs.path
        assert theirs.value.sharding.is_equivalent_to(ours.value.sharding, len(ours.shape))


def test_a_layout_map_of_the_user_is_kept():
    x, y = records()
    layouts = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((2, 4), ["data", "model"]))
    layouts["second/kernel"] = (None, "model")
    with pk.AutoShardDistribution(layout_map=layouts).scope():
        model = wide()
        model.fit(x, y, batch_size=BATCH, verbose=0)
    assert tuple(model.get_layer("second").kernel.value.sharding.spec) == (None, "model")


@pytest.mark.slow
def test_two_models_share_layers():
    """As in a GAN: the layouts that one model's plan has chosen are kept by the plan of the other."""
    x, y = records()
    with pk.AutoShardDistribution(memory="1MiB").scope():
        shared = layers.Dense(WIDE, "relu")
        models = []
        for _ in range(2):
            inputs = keras.Input((FEATURES,))
            models.append(compiled(keras.Model(inputs, layers.Dense(CLASSES, "softmax")(shared(inputs)))))
        losses = []
        for _ in range(3):
            layout = None
            for model in models:
                losses.append(float(model.train_on_batch(x, y)))
                layout = layout or shared.kernel.value.sharding
                assert shared.kernel.value.sharding == layout
    assert losses[-1] < losses[0]


def test_explain_prints_the_paths_of_variables(capsys):
    distribution = pk.AutoShardDistribution()
    with distribution.scope():
        model = wide()
        model.fit(*records(), batch_size=BATCH, verbose=0)
    distribution.explain()
    printed = capsys.readouterr().out
    assert "trainable/second/kernel" in printed
    assert "data parallel" in printed


def test_variables_of_one_path_have_the_layout_of_the_first():
    class Twins(keras.Model):
        def __init__(self):
            super().__init__(name="twins")
            self.wide, self.narrow = (keras.layers.Dense(size, use_bias=False, name="dense") for size in (64, 7))

        def call(self, x):
            return self.narrow(self.wide(x))

    def build():
        model = Twins()
        model.compile("adam", "mse")
        return model

    distribution = pk.AutoShardDistribution(memory="40KiB", hardware=AT_HAND)
    distribution.plan(build, (np.ones((16, 32), "float32"), np.ones((16, 7), "float32")))
    with pytest.warns(UserWarning, match="several variables have the path 'twins/dense/kernel'"):
        layout_map = distribution.layout_map()
    assert list(layout_map) == ["twins/dense/kernel"]


def test_training_on_a_batch_after_fit_plans_nothing():
    """Keras has no sample weights in the batches of `fit`, and None in those of `train_on_batch`."""
    x, y = records(BATCH)
    distribution = pk.AutoShardDistribution()
    with distribution.scope():
        model = wide()
        model.fit(x, y, batch_size=BATCH, verbose=0)
        plan, seconds = distribution.plans["train"], distribution.planning_seconds
        model.train_on_batch(x, y)
    assert distribution.plans["train"] is plan
    assert distribution.planning_seconds == seconds


@pytest.mark.slow
def test_values_that_are_replaced_are_freed():
    """A planned function keeps no values alive, and a distribution keeps no model alive."""
    x, y = records()
    others = jax.live_arrays()
    distribution = pk.AutoShardDistribution(memory="1MiB")
    with distribution.scope():
        model = wide()
        model.fit(x, y, batch_size=BATCH, verbose=0, validation_data=(x, y))
        model.predict(x, verbose=0)
        shape = model.get_layer("second").kernel.shape
        model.set_weights([np.zeros(weight.shape) for weight in model.get_weights()])
        gc.collect()
        assert len([each for each in new_arrays(others) if each.shape == shape]) == 3
    del model
    gc.collect()
    assert [each for each in new_arrays(others) if each.shape == shape] == []


def test_initializers_that_differ_only_in_an_array_are_not_confused():
    def holding(array):
        return lambda shape, dtype=None: jax.jit(lambda: jax.numpy.asarray(array, dtype))()

    layout = ProvisionalLayouts(jax.devices()).of((8, 16)).backend_layout
    arrays = [np.full((8, 16), value, "float32") for value in range(3)]
    for array in arrays:
        np.testing.assert_array_equal(create(holding(array), (8, 16), "float32", layout), array)


def test_an_initializer_with_state_in_python_is_called_once():
    class Drawing(keras.initializers.Initializer):
        def __init__(self):
            self.rng = np.random.default_rng(0)

        def __call__(self, shape, dtype=None):
            return self.rng.normal(size=shape).astype(dtype)

    layout = ProvisionalLayouts(jax.devices()).of((8, 16)).backend_layout
    expected = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
    np.testing.assert_array_equal(create(Drawing(), (8, 16), "float32", layout), expected)
