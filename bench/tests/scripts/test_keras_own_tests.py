"""Keras's own tests pass with threaded epochs as without, and the script that reports it also reports failures."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import keras
import pytest
from bench.scripts.keras_own_tests import Report, Result, compare

_SCRIPT = Path(__file__).parents[2] / "scripts" / "keras_own_tests.py"

_KERAS, _OURS = "keras.src.backend.jax.trainer", "penstock.keras.epoch_iterator"
_DEFAULT = Report(
    _KERAS,
    {
        "test_fit": Result("passed", ((_KERAS, "MainThread"),)),
        "test_layout": Result("passed"),
        "test_ragged": Result("skipped"),
        "test_devices": Result("failed", text="too few"),
    },
)
_THREADED = Report(_OURS, _DEFAULT.tests | {"test_fit": Result("passed", ((_OURS, "MainThread"), (_OURS, "penstock-7")))})


def _but(report: Report, **results: Result) -> Report:
    return replace(report, tests=report.tests | results)


def _without(report: Report, name: str) -> Report:
    return replace(report, tests={other: result for other, result in report.tests.items() if other != name})


def test_runs_that_end_alike_are_alike():
    assert compare(_DEFAULT, _THREADED).ok


@pytest.mark.parametrize(
    ("default", "threaded", "difference"),
    [
        (_DEFAULT, _but(_THREADED, test_layout=Result("failed")), {"test_layout": ("passed", "failed")}),
        (_DEFAULT, _but(_THREADED, test_devices=Result("passed")), {"test_devices": ("failed", "passed")}),
        (_DEFAULT, _without(_THREADED, "test_layout"), {"test_layout": ("passed", "absent")}),
        (_without(_DEFAULT, "test_ragged"), _THREADED, {"test_ragged": ("absent", "skipped")}),
    ],
)
def test_each_test_that_ends_otherwise_is_named(default, threaded, difference):
    comparison = compare(default, threaded)
    assert comparison.differences == difference
    assert not comparison.ok


@pytest.mark.parametrize(
    ("default", "threaded", "problem"),
    [
        (_DEFAULT, _DEFAULT, f"threaded run: the epoch iterator is of {_KERAS}"),
        (_but(_DEFAULT, test_fit=_THREADED.tests["test_fit"]), _THREADED, "default run: penstock read batches"),
        (
            _but(_DEFAULT, test_layout=_DEFAULT.tests["test_fit"]),
            _but(_THREADED, test_layout=Result("passed", ((_KERAS, "MainThread"),))),
            "threaded run: Keras's own iterator read for test_layout",
        ),
        # Our iterator was in place, but every batch was read on Keras's own thread.
        (
            _DEFAULT,
            _but(_THREADED, test_fit=Result("passed", ((_OURS, "MainThread"),))),
            "threaded run: no thread of penstock read a batch",
        ),
        (replace(_DEFAULT, keras="3.15.1"), replace(_THREADED, keras="3.16.0"), "Keras 3.15.1 by default, 3.16.0 threaded"),
        (replace(_DEFAULT, tests={}), replace(_THREADED, tests={}), "no test passed"),
    ],
)
def test_runs_that_are_not_one_of_each_do_not_count(default, threaded, problem):
    comparison = compare(default, threaded)
    assert problem in comparison.problems
    assert not comparison.differences
    assert not comparison.ok


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_keras_tests_pass_as_they_do_without_threads():
    paths = ("trainers/trainer_test.py", "trainers/epoch_iterator_test.py", "backend/jax/trainer_test.py")
    done = subprocess.run([sys.executable, _SCRIPT, *paths], capture_output=True, text=True)
    if not (Path(keras.__path__[0]) / "src" / paths[0]).exists():  # from Keras 3.16 on, only its repository has the tests
        assert done.returncode == 1
        assert f"Keras {keras.__version__}" in done.stderr
        assert "has no tests in trainers/trainer_test.py" in done.stderr
        assert "give --tests a checkout" in done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Keras {keras.__version__}: its own tests" in done.stdout


_TEST = """
import keras
import numpy as np

def test_the_copy_is_what_runs():
    assert keras.__file__.startswith({folder!r})

def test_fit():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(((np.ones((4, 3)), np.ones(4)) for _ in range(4)), shuffle=False, steps_per_epoch=4, verbose=0)
"""


@pytest.mark.slow
def test_the_tests_of_a_checkout_are_run_in_a_copy_of_the_package(tmp_path):
    test = tmp_path / "checkout" / "keras" / "src" / "trainers" / "trainer_test.py"
    test.parent.mkdir(parents=True)
    test.write_text(_TEST.format(folder=str(tmp_path / "temporary")))
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, _SCRIPT, "trainers/trainer_test.py", "--tests", tmp_path / "checkout"]
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Keras {keras.__version__}: its own tests" in done.stdout
    missing = subprocess.run([*command[:2], "trainers/none_test.py", *command[3:]], capture_output=True, text=True)
    assert "has no tests in keras/src/trainers/none_test.py" in missing.stderr
