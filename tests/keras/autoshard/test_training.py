"""Models of all kinds train under a plan as on one device, with whatever Keras's trainer offers."""

import keras
import numpy as np
import pytest
from keras import layers
from tests.keras.autoshard.models import (
    BATCH,
    CLASSES,
    FEATURES,
    OwnStep,
    Subclassed,
    assert_trains_as_on_one_device,
    compiled,
    records,
    sequential,
)

import penstock as ps
import penstock.keras as pk


def fit(model, count=64, **options):
    x, y = records(count)
    return model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, **{"epochs": 2, **options})


@pytest.mark.parametrize("mesh", [(2, 4), pytest.param(None, marks=pytest.mark.slow)])
def test_a_sequential_model(mesh):
    names = ["data", "model"][: len(mesh)] if mesh else None
    device_mesh = keras.distribution.DeviceMesh(mesh, names) if mesh else None
    distribution = assert_trains_as_on_one_device(sequential, fit, device_mesh=device_mesh)
    if mesh:
        assert distribution.plans["train"].mesh_shape == dict(zip(names, mesh, strict=True))


@pytest.mark.slow
def test_a_functional_model_with_several_inputs_and_outputs():
    from tests.keras.autoshard.models import functional

    x, y = records()

    def fit(model):
        data = {"left": x, "right": x[::-1].copy()}
        return model.fit(data, {"kind": y, "size": x.sum(1)}, batch_size=BATCH, shuffle=False, verbose=0, epochs=2)

    assert_trains_as_on_one_device(functional, fit)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Subclassed, OwnStep])
def test_a_subclassed_model(kind):
    assert_trains_as_on_one_device(lambda: compiled(kind()), fit)


@pytest.mark.slow
def test_a_distribution_that_is_set():
    distribution = pk.AutoShardDistribution()
    keras.distribution.set_distribution(distribution)
    try:
        fit(sequential())
    finally:
        keras.distribution.set_distribution(None)
    assert "train" in distribution.plans


@pytest.mark.slow
def test_validation_and_a_smaller_last_batch():
    x, y = records(20, seed=1)
    assert_trains_as_on_one_device(sequential, lambda model: fit(model, 70, validation_data=(x, y), validation_batch_size=8))


@pytest.mark.slow
def test_sample_weights_and_class_weights():
    weights = np.linspace(0.5, 2, 64, dtype="float32")
    assert_trains_as_on_one_device(sequential, lambda model: fit(model, sample_weight=weights))
    assert_trains_as_on_one_device(sequential, lambda model: fit(model, class_weight={n: 1.0 + n for n in range(CLASSES)}))


@pytest.mark.slow
def test_mixed_precision():
    def build():
        policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            return compiled(Subclassed())  # a metric that counts would jump where two classes are nearly equal
        finally:
            keras.config.set_dtype_policy(policy)

    assert_trains_as_on_one_device(build, fit, rtol=2e-2)


@pytest.mark.slow
def test_loss_scaling():
    def build():
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-2), initial_scale=4.0, dynamic_growth_steps=2)
        return sequential(optimizer=optimizer)

    assert_trains_as_on_one_device(build, fit)


@pytest.mark.slow
def test_gradient_accumulation():
    assert_trains_as_on_one_device(lambda: sequential(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)), fit)


@pytest.mark.slow
def test_averages_of_weights():
    assert_trains_as_on_one_device(
        lambda: sequential(optimizer=keras.optimizers.Adam(1e-2, use_ema=True, ema_overwrite_frequency=3)), fit
    )


@pytest.mark.slow
def test_several_steps_in_one_execution():
    """There are five batches, and two in an execution."""
    x, y = records(20, seed=1)
    distribution = assert_trains_as_on_one_device(
        lambda: sequential(steps_per_execution=2), lambda model: fit(model, 80, validation_data=(x, y), validation_batch_size=8)
    )
    assert set(distribution.plans) == {"train", "evaluate"}


@pytest.mark.parametrize("rows", [28, pytest.param(50, marks=pytest.mark.slow)])
def test_predictions_in_executions_of_batches_of_different_sizes(rows):
    """The last execution has batches of 8, and a smaller one that is left to the compiler."""

    def build():
        keras.utils.set_random_seed(0)
        model = sequential(steps_per_execution=4)
        model.build((None, FEATURES))  # Keras 3.16 would build it for a stack of batches
        return model

    x, _ = records(rows)
    alone = build().predict(x, batch_size=8, verbose=0)
    with pk.AutoShardDistribution().scope():
        model = build()
        np.testing.assert_allclose(model.predict(x, batch_size=8, verbose=0), alone, rtol=1e-5)
        fit(model)
        assert model.predict(x, batch_size=8, verbose=0).shape == alone.shape


@pytest.mark.slow
def test_lora():
    def build():
        inputs = keras.Input((FEATURES,))
        hidden = layers.Dense(64, "relu")
        model = keras.Model(inputs, layers.Dense(CLASSES, "softmax")(hidden(inputs)))
        hidden.enable_lora(4)
        return compiled(model)

    distribution = assert_trains_as_on_one_device(build, fit)
    paths = [leaf.path for leaf in distribution.plans["train"].inputs]
    assert any(path.startswith("trainable/") and "lora" in path for path in paths)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras's conversion to NumPy
def test_a_quantized_layer_with_lora():
    def build():
        inputs = keras.Input((FEATURES,))
        hidden = layers.Dense(64, "relu")
        model = keras.Model(inputs, layers.Dense(CLASSES, "softmax")(hidden(inputs)))
        hidden.quantize("int8")
        hidden.enable_lora(4)
        return compiled(model)

    assert_trains_as_on_one_device(build, fit)


@pytest.mark.slow
def test_recurrent_and_convolutional_layers():
    def build():
        return compiled(
            keras.Sequential(
                [
                    layers.Reshape((8, 4)),
                    layers.Conv1D(32, 3, padding="same", activation="relu"),
                    layers.LSTM(32, return_sequences=True),
                    layers.GlobalAveragePooling1D(),
                    layers.Dense(CLASSES, "softmax"),
                ]
            )
        )

    assert_trains_as_on_one_device(build, fit)


@pytest.mark.parametrize(
    ("data", "threaded"),
    [
        ("loader", False),
        pytest.param("generator", True, marks=pytest.mark.slow),
        pytest.param("PyDataset", True, marks=pytest.mark.slow),
    ],
)
def test_data_of_each_kind(data, threaded):
    x, y = records()

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return x[index * BATCH : (index + 1) * BATCH], y[index * BATCH : (index + 1) * BATCH]

    def fit(model):
        if data == "loader":
            return model.fit(pk.data(ps.Loader((x, y), batch_size=BATCH, shuffle=True, seed=3)), epochs=2, verbose=0)
        if data == "generator":
            batches = (Batches()[n % 4] for n in range(8))
            return model.fit(batches, steps_per_epoch=4, epochs=2, verbose=0, shuffle=False)
        return model.fit(Batches(), epochs=2, verbose=0, shuffle=False)

    def fit_threaded(model):
        with pk.threaded_epochs():
            return fit(model)

    assert_trains_as_on_one_device(sequential, fit_threaded if threaded else fit)


def test_batch_methods():
    class Losses:
        def __init__(self, **history):
            self.history = history

    x, y = records()

    def fit(model):
        losses = [model.train_on_batch(x[:BATCH], y[:BATCH])[0] for _ in range(3)]
        return Losses(
            loss=losses, tested=model.test_on_batch(x[:8], y[:8]), outputs=model.predict_on_batch(x[:5]).ravel().tolist()
        )

    assert_trains_as_on_one_device(sequential, fit)


def test_a_model_that_only_predicts():
    x, _ = records(50)

    def build():
        keras.utils.set_random_seed(3)
        return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(64, "relu"), layers.Dense(CLASSES)])

    alone = build().predict(x, verbose=0)
    distribution = pk.AutoShardDistribution()
    with distribution.scope():
        planned = build().predict(x, verbose=0)
    np.testing.assert_allclose(planned, alone, rtol=1e-4, atol=1e-5)
    assert list(distribution.plans) == ["predict"]


@pytest.mark.slow
def test_prediction_before_training():
    """The plan of the training step may change the layouts that prediction had chosen."""
    x, y = records()

    def fit(model):
        model.predict(x, verbose=0)
        history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=2)
        history.history["after"] = model.predict(x[:10], verbose=0).ravel().tolist()
        return history

    assert_trains_as_on_one_device(sequential, fit)


@pytest.mark.slow
def test_a_step_is_compiled_once():
    """The values of variables come from initializers, from steps, and from resets of metrics."""
    x, y = records()
    with pk.AutoShardDistribution().scope():
        model = sequential()
        for _ in range(2):
            model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, validation_data=(x, y))
        for function in (model.train_function, model.test_function):
            assert [jitted._cache_size() for jitted in function._jitted.values()] == [1]


def sequences(length, rows, rng):
    return rng.integers(0, 64, (rows, length)).astype("int32"), rng.integers(0, CLASSES, rows).astype("int32")


def recurrent():
    model = keras.Sequential([layers.Embedding(64, 32), layers.LSTM(32), layers.Dense(CLASSES, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


@pytest.mark.slow
def test_batches_of_several_shapes_in_turn():
    """Each shape is planned for; variables keep the layouts of the first, and smaller batches are left to the compiler."""

    def fit(model):
        rng = np.random.default_rng(0)
        shapes = ((12, 16), (40, 16), (12, 16), (20, 5), (12, 5), (40, 8))
        data = (sequences(length, rows, rng) for length, rows in shapes)
        return model.fit(data, steps_per_epoch=len(shapes), verbose=0, shuffle=False)

    assert_trains_as_on_one_device(recurrent, fit)


@pytest.mark.slow
def test_variables_stay_where_they_are_if_the_shape_changes():
    rng = np.random.default_rng(0)
    with pk.AutoShardDistribution().scope():
        model = recurrent()
        model.train_on_batch(*sequences(12, 16, rng))
        before = [each.value.sharding for each in model.variables]
        model.train_on_batch(*sequences(40, 32, rng))
        assert [each.value.sharding for each in model.variables] == before
