"""Processes with a saved `fit` that are killed at random moments, or stopped by signals, and started again."""

from __future__ import annotations

import random
import signal

import numpy as np
import pytest

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
def test_sigterm_saves_ends_with_status_0_and_says_how_to_continue(tmp_path, unbroken):
    ended = break_at(tmp_path, signal.SIGTERM, 0.1)
    assert ended.status == 0
    assert "penstock: SIGTERM: saved after" in ended.errors
    assert "; to continue: " in ended.errors
    assert_ends_as(tmp_path, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "names"), [((), "KILL TERM INT"), (("--steps-per-execution", "4"), "TERM KILL")], ids=["1", "4"]
)
def test_kills_and_signals_at_random_moments(tmp_path, options, names):
    with Attempt(tmp_path / "unbroken", 1, 1, MODULE, options) as attempt:
        assert attempt.end().status == 0
    for number in (signal.Signals[f"SIG{name}"] for name in names.split()):
        ended = break_at(tmp_path / "broken", number, random.uniform(0, 1.0), options)
        # Python takes its handlers away before it ends.
        assert ended.status == (-number if number == signal.SIGKILL else 0) or ended.phase == "end", ended.errors
    assert_ends_as(tmp_path / "broken", read_result(tmp_path / "unbroken"), options)
