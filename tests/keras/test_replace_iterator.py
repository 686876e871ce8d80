"""Threaded epochs are opt-in: they replace one class of Keras, and put it back."""

import os
import subprocess
import sys
import time

import pytest
from keras.src.backend.jax import trainer
from tests.extras import require
from tests.keras.training import batches, make_model

import penstock.keras as pk
from penstock.errors import UnsupportedVersionError
from penstock.keras import replace_iterator, versions
from penstock.keras.session import Session


def in_use():
    return trainer.JAXEpochIterator.__module__.startswith("penstock")


def run(script, **environment):
    environment = {"KERAS_BACKEND": "jax", **environment}
    command = [sys.executable, "-W", "ignore", "-c", script]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240)


@pytest.fixture
def _no_data_was_made(monkeypatch):
    pk.disable_threaded_epochs()
    monkeypatch.setattr(Session, "data_was_made", False)
    replace_iterator._restore_original()


@pytest.mark.usefixtures("_no_data_was_made")
def test_a_with_block_and_a_decorator_leave_keras_as_it_was():
    original = trainer.JAXEpochIterator
    with pk.threaded_epochs() as outer:
        assert in_use()
        with pk.threaded_epochs() as inner:
            assert inner is not outer
        assert in_use()
        assert Session.epochs is outer
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


def test_epochs_whose_batches_come_late_are_input_bound_in_their_statistics():
    def late():
        for batch in batches(40) * 2:
            time.sleep(0.02)
            yield batch

    model = make_model(built=True)
    model.fit(*batches()[0], verbose=0)  # compiles the step
    with pk.threaded_epochs() as epochs:
        model.fit(late(), epochs=2, steps_per_epoch=5, shuffle=False, verbose=0)
    (stats,) = epochs.stats()
    assert "input-bound" in stats.verdict
    assert "`iterate`" in stats.verdict


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
    assert done.stdout.strip() == ("penstock.keras.epoch_iterator" if on else "Keras is left alone")


def test_another_choice_is_an_error_that_lists_them(monkeypatch):
    monkeypatch.setenv("KERAS_JAX_EPOCH_ITERATOR", "Threaded")
    with pytest.raises(ValueError, match="'Threaded': choose from default, threaded"):
        replace_iterator.follow_environment()


@pytest.mark.slow
def test_another_backend_is_told_what_cannot_be_done():
    require("torch")
    script = "import penstock.keras as pk; pk.enable_threaded_epochs()"
    done = run(script, KERAS_BACKEND="torch")
    assert "Keras runs on the backend 'torch'" in done.stderr
    assert "KERAS_BACKEND=jax" in done.stderr
    done = run(script.replace("enable_threaded_epochs()", "data([1])"), KERAS_BACKEND="torch")
    assert "Keras runs on the backend 'torch'" in done.stderr


def package(folder, version):
    """Write a package `keras` of this version that cannot be imported, like an old Keras beside a new JAX."""
    source = folder / "keras"
    (source / "src").mkdir(parents=True)
    (source / "src" / "version.py").write_text(f'__version__ = "{version}"\n')
    (source / "__init__.py").write_text("raise RuntimeError('Keras was imported')\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.mark.parametrize(
    ("version", "script", "choice"),
    [
        ("3.17.0", "import penstock.keras", "threaded"),
        pytest.param("2.15.0", "import penstock.keras as pk; pk.data([1])", "", marks=pytest.mark.slow),
        pytest.param("3.14.2", "import penstock.keras as pk; pk.enable_threaded_epochs()", "", marks=pytest.mark.slow),
        pytest.param("4.0.0.dev2027010101", "import penstock.keras as pk; pk.data([1])", "", marks=pytest.mark.slow),
    ],
)
def test_an_unknown_version_of_keras_is_refused_in_one_line_before_it_is_imported(tmp_path, version, script, choice):
    done = run(script, KERAS_JAX_EPOCH_ITERATOR=choice, **package(tmp_path, version))
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f'penstock works with Keras 3.15 to 3.16, and this is Keras {version}: pip install "keras>=3.15,<3.17"'
    ]


@pytest.mark.slow
def test_without_keras_one_line_says_what_to_install(tmp_path):
    # Only a folder that Python puts first on its path can hide an installed package.
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'keras' else find(name, package)\n"
    )
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = run("import penstock.keras as pk; pk.enable_threaded_epochs()", **path)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        'penstock.keras needs Keras 3.15 to 3.16, and there is no Keras: pip install "keras>=3.15,<3.17"'
    ]


@pytest.mark.usefixtures("_no_data_was_made")
def test_a_build_that_is_not_what_its_version_says_is_refused_and_left_alone(monkeypatch):
    """Such a build is a nightly from before the changes that its version number stands for."""
    other = "3.15.1" if versions.behaviour().stacks else "3.16.0"
    monkeypatch.setattr(versions, "keras_version", lambda: other)
    versions.behaviour.cache_clear()
    try:
        with pytest.raises(UnsupportedVersionError, match=f"this is Keras {other}, whose trainer takes batches in another way"):
            pk.enable_threaded_epochs()
    finally:
        versions.behaviour.cache_clear()
    assert not in_use()
