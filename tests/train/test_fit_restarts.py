"""`fit` continues exactly: after any stop, on other devices, with another plan, for more steps."""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.train import models
from tests.train.training import Points, fit, mesh

import penstock as ps
from penstock.train import run_folder


def test_continued_run_equals_one_in_one_go(tmp_path, straight):
    for steps in (10, 17, 40):
        state = fit(steps, tmp_path, save_every=5)
    assert models.equal(state, straight)


def test_finished_run_returns_its_state_again(tmp_path, straight):
    fit(40, tmp_path)
    for state in (models.init, models.init()):
        points = Points()
        assert models.equal(fit(40, tmp_path, state=state, log=[points]), straight)
        assert not points.of("train")
        assert points.of("begin")[0].step == 40


@pytest.mark.parametrize(
    ("before", "after"), [(1, 8), pytest.param(8, 4, marks=pytest.mark.slow), pytest.param(4, 1, marks=pytest.mark.slow)]
)
def test_run_continues_on_another_number_of_devices(tmp_path, straight, before, after):
    for devices, steps in ((before, 15), (after, 40)):
        with ps.feed(models.loader(), to=NamedSharding(mesh(devices), P("data"))) as feed:
            state = fit(steps, tmp_path, feed)
    np.testing.assert_allclose(state["w"]["a"], straight["w"]["a"], atol=1e-5)
    assert np.array_equal(state["seen"], straight["seen"])
    assert len(state["w"]["a"].sharding.device_set) == after


@pytest.mark.slow
def test_run_continues_with_another_plan(tmp_path, straight):
    abstract = jax.eval_shape(models.init), jax.eval_shape(lambda: models.loader()[0])
    for shape, steps in (({"data": 8}, 15), ({"data": 2, "model": 4}, 40)):
        plan = ps.plan(models.step, *abstract, mesh=shape, hardware="tpu-v5e")
        state = fit(steps, tmp_path, plan=plan)
        assert state["w"]["a"].sharding.is_equivalent_to(plan.shardings[0]["w"]["a"], 2)
    np.testing.assert_allclose(state["w"]["a"], straight["w"]["a"], atol=1e-5)
    assert np.array_equal(state["seen"], straight["seen"])


def test_checkpoint_holds_the_plan(tmp_path):
    abstract = jax.eval_shape(models.init), jax.eval_shape(lambda: models.loader()[0])
    plan = ps.plan(models.step, *abstract, mesh={"data": 8}, hardware="tpu-v5e")
    fit(5, tmp_path, plan=plan)
    assert ps.Plan.load(tmp_path / "checkpoints/step-5/plan.json").mesh_shape == plan.mesh_shape


def test_run_starts_from_a_checkpoint_of_another_folder(tmp_path, straight):
    fit(20, tmp_path / "a", save_every=10)
    branched = tmp_path / "b"
    assert models.equal(fit(40, branched, restore=tmp_path / "a/checkpoints/step-10"), straight)
    assert models.equal(fit(40, tmp_path / "c", restore=tmp_path / "a"), straight)
    assert models.equal(fit(40, branched, restore=tmp_path / "a/checkpoints/step-10"), straight)  # a restart of it


def test_error_of_the_feed_is_raised_after_the_state_is_saved(tmp_path, straight):
    def failing(number):
        if number == 20 and not (tmp_path / "mended").exists():
            raise OSError("disk gone")
        return models.loader()[number]

    with pytest.raises(OSError, match="disk gone"):
        fit(40, tmp_path, feed=ps.Steps(failing, name="failing"), save_every=15)
    (tmp_path / "mended").touch()
    points = Points()
    assert models.equal(fit(40, tmp_path, feed=ps.Steps(failing, name="failing"), log=[points]), straight)
    assert points.of("begin")[0].step == 20


def test_settings_may_change_as_long_as_nothing_was_saved(tmp_path):
    with pytest.raises(TypeError):
        fit(5, tmp_path, step=lambda state, batch: state, config={"rate": 0.1})
    fit(5, tmp_path, config={"rate": 0.2})
    with pytest.raises(ps.OtherRunError, match=r"rate was 0\.2 and is 0\.1"):
        fit(10, tmp_path, config={"rate": 0.1})


# Orbax leaves writes of TensorStore behind, which end after its event loop.
@pytest.mark.filterwarnings("ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning")
def test_run_folder_that_is_moved_away_ends_the_training_with_its_name(tmp_path):
    def move(point):
        if point.kind == "train" and point.step == 20:
            (tmp_path / "run").rename(tmp_path / "moved")

    with pytest.raises(ps.CheckpointError, match="could not be saved to"):
        fit(200, tmp_path / "run", log=[move], save_every=25)
    assert not list(tmp_path.glob("run/checkpoints/*/MANIFEST.json"))


HOLDER = """
import os, pathlib, sys, time
from penstock.train import run_folder
lock = run_folder._locked(pathlib.Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


def test_killed_process_leaves_no_lock_although_a_forked_child_lives(tmp_path):
    path = tmp_path / "run.lock"
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", HOLDER, path], stdout=subprocess.PIPE, text=True) as holder:
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(RuntimeError, match=rf"another process \(process {holder.pid} on .+\) is training in"):
                run_folder._locked(path)
            holder.kill()
            holder.wait()
            run_folder._locked(path).release()
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(("code", "refused"), [(errno.ENOLCK, False), (errno.ENOSYS, False), (errno.EACCES, True)])
def test_file_system_without_locks_is_used_without_one(tmp_path, monkeypatch, code, refused):
    def fail(*given):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("filelock.FileLock.acquire", fail)
    with pytest.raises(OSError, match="Permission denied") if refused else contextlib.nullcontext():
        run_folder._locked(tmp_path / "run.lock").release()


def lines(path):
    """Return step and loss of each line."""
    return [(line["step"], line["loss"]) for line in map(json.loads, path.read_text().splitlines())]


@pytest.mark.parametrize("keeps", [25, pytest.param(30, marks=pytest.mark.slow)])
def test_no_metric_is_lost_or_changed_by_a_restart(tmp_path, keeps):
    """A run is killed after step 40 and continues at step 25, in the middle of an interval, or at step 30."""
    fit(60, log=[ps.log.jsonl(tmp_path / "straight.jsonl")])
    log = tmp_path / "broken.jsonl"
    fit(40, tmp_path / "run", save_every=5, keep=9, log=[ps.log.jsonl(log)])
    for path in (tmp_path / "run/checkpoints").iterdir():
        if int(path.name[5:]) > keeps:
            shutil.rmtree(path)
    fit(60, tmp_path / "run", log=[ps.log.jsonl(log)])
    assert lines(log) == lines(tmp_path / "straight.jsonl")


def test_metrics_before_an_error_are_logged_after_the_restart(tmp_path):
    def fail(point):
        if point.kind == "train" and point.step == 20:
            raise KeyError("broken")

    straight, log = tmp_path / "straight.jsonl", tmp_path / "broken.jsonl"
    fit(60, log=[ps.log.jsonl(straight)])
    with pytest.raises(KeyError):
        fit(60, tmp_path / "run", log=[fail, ps.log.jsonl(log)])
    fit(60, tmp_path / "run", log=[ps.log.jsonl(log)])
    assert lines(log) == lines(straight)


def test_goodput_file_that_is_another_counts_as_none(tmp_path):
    fit(5, tmp_path)
    text = (tmp_path / "goodput.json").read_text()
    for broken in (
        text.replace('"begin": 0', '"begin": "a"'),
        text.replace('"parts": {', '"parts": [], "x": {'),
        '{"attempts": [3]}',
        "[]",
    ):
        assert broken != text
        (tmp_path / "goodput.json").write_text(broken)
        fit(5, tmp_path)
        assert json.loads((tmp_path / "goodput.json").read_text())["run"]["attempts"] == 1


class Numbers:
    """An iterator with a state, which cannot be read a second time."""

    def __init__(self):
        self._next = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self._next == 12:
            raise StopIteration
        self._next += 1
        return {"x": np.full(8, self._next, np.float32)}

    def get_state(self):
        return self._next

    def set_state(self, state):
        self._next = state


def test_run_whose_iterator_has_ended_returns_its_state_again_and_says_that_steps_are_missing(tmp_path, caplog):
    def run(steps):
        return fit(steps, tmp_path, feed=Numbers(), step=lambda sum, batch: (sum + batch["x"][0], {}), state=0.0)

    assert float(run(None)) == float(run(None)) == 78
    assert not caplog.records
    assert float(run(20)) == 78
    assert "the feed ended after 12 of 20 steps" in caplog.text


def test_goodput_is_kept_over_attempts(tmp_path):
    points = Points()
    fit(20, tmp_path, save_every=5)
    fit(40, tmp_path, log=[points])
    goodput = points.of("end")[0].goodput
    saved = json.loads((tmp_path / "goodput.json").read_text())["run"]
    assert goodput.attempts == saved["attempts"] == 2
    assert goodput.lost_steps == 0
    assert sum(goodput.parts.values()) == pytest.approx(goodput.seconds, rel=1e-6)
    assert 0 < goodput.share < 1


def test_python_numbers_do_not_make_a_step_promote_otherwise_than_it_was_checked(tmp_path):
    def init():
        return {"rate": 1.0, "half": jnp.ones(2, jnp.bfloat16)}

    def widening(state, batch):
        return {**state, "half": state["half"] * state["rate"]}, {}

    with pytest.raises(TypeError, match=r"half: bfloat16\[2\] → float32\[2\]"):
        fit(5, tmp_path, step=widening, state=init)

    def narrow(state, batch):
        return {**state, "rate": state["rate"] * jnp.ones((), jnp.bfloat16)}, {}

    for steps in (5, 8):
        assert fit(steps, tmp_path, step=narrow, state=init())["rate"].dtype == jnp.float32


def test_functions_in_the_state_may_be_others_each_time_it_is_made(tmp_path):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class TrainState:
        count: jax.Array
        update: Callable = dataclasses.field(metadata={"static": True})

    def init():
        return TrainState(jnp.int32(0), lambda count: count + 1)

    def step(state, batch):
        return dataclasses.replace(state, count=state.update(state.count)), {}

    for steps in (5, 8):
        assert int(fit(steps, tmp_path, step=step, state=init).count) == steps
