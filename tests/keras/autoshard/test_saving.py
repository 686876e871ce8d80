"""Files that are saved under a plan are loaded on any number of devices, in shards, and Keras's callbacks continue there."""

import jax
import keras
import numpy as np
import pytest
from keras import layers
from tests.keras.autoshard.models import BATCH, CLASSES, FEATURES, compiled, records, shards

import penstock.keras as pk

# Keras's conversion of a variable to NumPy
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def on(count, **options):
    return pk.AutoShardDistribution(devices=jax.devices()[:count], **options)


def fit(model, **options):
    x, y = records()
    return model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, **options).history["loss"]


def built():
    """A model without dropout, because Keras does not save the state of its seeds."""
    keras.utils.set_random_seed(5)
    inputs = keras.Input((FEATURES,))
    hidden = layers.BatchNormalization()(layers.Dense(64, "relu")(inputs))
    model = compiled(keras.Model(inputs, layers.Dense(CLASSES, "softmax")(hidden)))
    model.optimizer.build(model.trainable_variables)
    return model


def kernel(model):
    return model.layers[1].kernel


@pytest.fixture
def trained():
    """A model that was trained on eight devices."""
    with on(8).scope():
        model = built()
        fit(model)
    return model


@pytest.mark.parametrize("count", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_weights(trained, tmp_path, count):
    trained.save_weights(tmp_path / "model.weights.h5")
    with on(count).scope():
        model = built()
        model.load_weights(tmp_path / "model.weights.h5")
        assert shards(kernel(model)) == count
        for ours, theirs in zip(model.get_weights(), trained.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_keras_file_continues_the_training(tmp_path, count):
    with on(8).scope():
        model = built()
        fit(model)
        model.save(tmp_path / "model.keras")
        expected = fit(model)
    with on(count).scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
        np.testing.assert_allclose(fit(loaded), expected, rtol=1e-4)


class _StopAfter(keras.callbacks.Callback):
    """An interruption in the middle of the training."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, 2])
def test_backup_and_restore(tmp_path, count):
    with on(8).scope():
        expected = fit(built(), epochs=3)
        with pytest.raises(KeyboardInterrupt):
            fit(built(), epochs=3, callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "b"), _StopAfter(1)])
    with on(count).scope():
        rest = fit(built(), epochs=3, callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "b")])
    np.testing.assert_allclose(rest, expected[-len(rest) :], rtol=1e-4)
    assert len(rest) < 3


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 1])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Orbax
@pytest.mark.filterwarnings("ignore::UserWarning:orbax")
def test_an_orbax_checkpoint(tmp_path, count):
    with on(8).scope():
        model = built()
        callback = keras.callbacks.OrbaxCheckpoint(str(tmp_path / "c"), save_on_background=False)
        fit(model, callbacks=[callback])
        expected = fit(model)
    with on(count).scope():
        loaded = keras.saving.load_model(str(tmp_path / "c"))
        np.testing.assert_allclose(fit(loaded), expected, rtol=1e-4)
        assert shards(kernel(loaded)) in (1, count)


@pytest.mark.slow
def test_weights_of_a_plan_are_loaded_into_its_layouts(trained, tmp_path):
    trained.save_weights(tmp_path / "model.weights.h5")
    x, y = records(BATCH)
    distribution = on(8, memory="60KiB")
    plan = distribution.plan(built, (x, y))
    layouts = {leaf.path: leaf.partition_spec for leaf in plan.inputs}
    with distribution.scope():
        model = built()
        model.load_weights(tmp_path / "model.weights.h5")
    for variable in model.trainable_variables:
        assert variable.value.sharding.spec == layouts[f"trainable/{variable.path}"]


@pytest.mark.slow
def test_a_model_is_cloned_and_compiled_from_its_config(trained):
    with on(4).scope():
        clone = keras.models.clone_model(trained)
        clone.set_weights(trained.get_weights())
        compiled(clone)
        assert np.isfinite(fit(clone)).all()
    assert isinstance(clone.layers[1], layers.Dense)
    assert clone.layers[-1].units == CLASSES
