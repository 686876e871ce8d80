"""Threaded epochs are opt-in, exchange one class, and put it back."""

import os
import subprocess
import sys

import keras
import pytest
from keras.src.backend.jax import trainer
from tests.keras.training import batches, make_model

import penstock.keras as pk
from penstock.keras import _switch


def in_use():
    return trainer.JAXEpochIterator.__module__.startswith("penstock")


def run(script, **environment):
    environment = {"KERAS_BACKEND": "jax", **environment}
    command = [sys.executable, "-W", "ignore", "-c", script]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240)


@pytest.fixture
def _no_data_was_made(monkeypatch):
    pk.disable_threaded_epochs()
    monkeypatch.setattr(_switch._Switch, "data_was_made", False)
    _switch._put_back()


@pytest.mark.usefixtures("_no_data_was_made")
def test_a_with_block_and_a_decorator_leave_keras_as_it_was():
    original = trainer.JAXEpochIterator
    with pk.threaded_epochs() as outer:
        assert in_use()
        with pk.threaded_epochs() as inner:
            assert inner is not outer
        assert in_use()
        assert _switch.current() is outer
    assert trainer.JAXEpochIterator is original

    @pk.threaded_epochs()
    def train():
        assert in_use()
        raise KeyError

    with pytest.raises(KeyError):
        train()
    assert trainer.JAXEpochIterator is original


@pytest.mark.usefixtures("_no_data_was_made")
def test_enabling_and_disabling_may_be_repeated():
    original = trainer.JAXEpochIterator
    assert pk.enable_threaded_epochs() is pk.enable_threaded_epochs()
    assert in_use()
    with pk.threaded_epochs():
        pass
    assert in_use()
    for _ in range(2):
        pk.disable_threaded_epochs()
        assert trainer.JAXEpochIterator is original


def test_statistics_are_one_for_each_run_with_its_epochs_added_up():
    model = make_model()
    with pk.threaded_epochs() as epochs:
        assert epochs.stats() == []
        data = (batch for batch in batches() * 2)
        model.fit(data, epochs=2, steps_per_epoch=5, shuffle=False, verbose=0, validation_data=batches()[0])
        model.evaluate((b for b in batches()), steps=6, verbose=0)
    training, validation, evaluation = epochs.stats()
    assert [training.steps, validation.steps, evaluation.steps] == [10, 2, 6]
    assert training.host["iterate"] > 0
    assert training.bytes == sum(x.nbytes + y.nbytes for x, y in (batches() * 2)[:10])


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "on"), [("threaded", True), ("default", False), ("", False)])
def test_the_environment_decides_when_the_module_is_imported(choice, on):
    script = """
import sys, penstock.keras
if "keras" in sys.modules:
    from keras.src.backend.jax import trainer
    print(trainer.JAXEpochIterator.__module__)
else:
    print("Keras is left alone")
"""
    done = run(script, KERAS_JAX_EPOCH_ITERATOR=choice)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ("penstock.keras._epochs" if on else "Keras is left alone")


def test_another_choice_is_an_error_that_lists_them(monkeypatch):
    monkeypatch.setenv("KERAS_JAX_EPOCH_ITERATOR", "Threaded")
    with pytest.raises(ValueError, match="'Threaded': choose from default, threaded"):
        _switch.follow_environment()


@pytest.mark.slow
def test_another_backend_is_told_what_cannot_be_done():
    script = "import penstock.keras as pk; pk.enable_threaded_epochs()"
    done = run(script, KERAS_BACKEND="torch")
    assert "Keras runs on the backend 'torch'" in done.stderr
    assert "KERAS_BACKEND=jax" in done.stderr
    done = run(script.replace("enable_threaded_epochs()", "data([1])"), KERAS_BACKEND="torch")
    assert "Keras runs on the backend 'torch'" in done.stderr


@pytest.mark.usefixtures("_no_data_was_made")
@pytest.mark.parametrize("version", ["3.14.2", "3.16.0", "4.0.0"])
def test_an_unknown_version_of_keras_is_refused_and_left_alone(version, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    with pytest.raises(RuntimeError, match=f"this is Keras {version}"):
        pk.enable_threaded_epochs()
    assert not in_use()
    assert keras.__version__ != version


def test_without_keras_it_says_what_to_install():
    script = """
import importlib.metadata, penstock.keras as pk
def missing(name): raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.version = missing
pk.enable_threaded_epochs()
"""
    assert 'pip install "penstock[keras]"' in run(script).stderr
