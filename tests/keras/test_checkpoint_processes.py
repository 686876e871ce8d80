"""Processes with a saved `fit` that are killed at random moments, or stopped by signals, and started again."""

from __future__ import annotations

import random
import signal

import numpy as np
import pytest
from tests.feed.process_group import run

from penstock_bench.faults.attempt import Attempt, read_result
from penstock_bench.faults.training import ideal

MODULE = "keras_training"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    with Attempt(folder, module=MODULE) as attempt:
        assert attempt.end().status == 0
    return read_result(folder)


def break_at(folder, number, seconds, options=()):
    with Attempt(folder, 1, 1, MODULE, options) as attempt:
        return attempt.break_at(seconds, number, "step")


def assert_ends_as(folder, unbroken, options=()):
    with Attempt(folder, 1, 1, MODULE, options) as attempt:
        ended = attempt.end()
    assert ended.status == 0, ended.errors
    result = read_result(folder)
    np.testing.assert_array_equal(result.arrays["seen"], ideal())
    assert result.digests == unbroken.digests


@pytest.mark.slow
def test_a_process_that_is_killed_in_an_epoch_continues_exactly(tmp_path, unbroken):
    ended = break_at(tmp_path, signal.SIGKILL, random.uniform(0.1, 0.8))
    assert ended.status == -signal.SIGKILL
    assert_ends_as(tmp_path, unbroken)


@pytest.mark.slow
def test_sigterm_saves_ends_with_status_0_and_says_how_to_continue(tmp_path, unbroken):
    ended = break_at(tmp_path, signal.SIGTERM, 0.1)
    assert ended.status == 0
    assert "penstock: SIGTERM: saved after" in ended.errors
    assert "; to continue: " in ended.errors
    assert_ends_as(tmp_path, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "names"), [((), "KILL TERM INT KILL"), (("--steps-per-execution", "4"), "TERM KILL")], ids=["1", "4"]
)
def test_kills_and_signals_at_random_moments(tmp_path, options, names):
    with Attempt(tmp_path / "unbroken", 1, 1, MODULE, options) as attempt:
        assert attempt.end().status == 0
    for number in (signal.Signals[f"SIG{name}"] for name in names.split()):
        ended = break_at(tmp_path / "broken", number, random.uniform(0, 1.0), options)
        # Python takes its handlers away before it ends.
        assert ended.status == (-number if number == signal.SIGKILL else 0) or ended.phase == "end", ended.errors
    assert_ends_as(tmp_path / "broken", read_result(tmp_path / "unbroken"), options)


SCRIPT = """
import os, sys, tempfile
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
    script = SCRIPT.replace("FOLDER", repr(str(tmp_path)))
    first, second = ([line for line in out.splitlines() if line.startswith("losses")] for out in run(script, 2))
    assert first == second
    assert first
