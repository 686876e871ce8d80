"""`fit` refuses what cannot work before it trains, and says why."""

import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.train import models
from tests.train.training import fit, mesh

import penstock as ps


def test_compiled_step_is_refused():
    compiled = jax.jit(models.step).lower(models.init(), models.loader()[0]).compile()
    with pytest.raises(ps.StepError, match=r"jax\.jit"):
        fit(4, step=compiled)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (
            lambda new: {**new, "w": {**new["w"], "a": new["w"]["a"].astype(jnp.bfloat16)}},
            r"w/a: float32\[4,16\] → bfloat16\[4,16\]",
        ),
        (lambda new: {**new, "more": jnp.zeros(3)}, r"more: not there → float32\[3\]"),
        (lambda new: {name: leaf for name, leaf in new.items() if name != "key"}, r"key: key<fry>\[\] → not there"),
    ],
)
def test_step_with_another_state_is_refused(leaf, message):
    def step(state, batch):
        new, metrics = models.step(state, batch)
        return leaf(new), metrics

    with pytest.raises(ps.StepError, match=message):
        fit(10, step=step)


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        ({"loss": jnp.zeros(3)}, ValueError, r"metric 'loss' of step is float32\[3\], and not a scalar"),
        ({"loss": "low"}, TypeError, "not a valid JAX type|str"),
        (jnp.zeros(()), TypeError, r"step returned float32\[\] as its metrics: return a dict from names to scalars"),
        ({"loss": jnp.complex64(1)}, TypeError, "complex64"),
        ({"loss": ps.Mean(jnp.zeros(2), 2)}, ValueError, "metric 'loss', total,"),
    ],
)
def test_metric_that_is_no_scalar_is_refused(metrics, error, message):
    def step(state, batch):
        return models.step(state, batch)[0], metrics

    with pytest.raises(error, match=message):
        fit(10, step=step)


def test_step_without_a_pair_is_refused():
    with pytest.raises(ps.StepError, match="a step returns a pair"):
        fit(10, step=lambda state, batch: models.step(state, batch)[0])


def test_checkpoint_of_another_model_is_refused_with_both_sides(tmp_path):
    fit(5, tmp_path)

    def wider():
        return {**models.init(), "w": {"a": jnp.zeros((4, 32)), "b": jnp.zeros((32, 1))}, "extra": jnp.zeros(2)}

    with pytest.raises(
        ps.OtherStateError,
        match=r"(?s)3 of 6 leaves differ.*extra +not there +float32\[2\].*w/a +float32\[4,16\] +float32\[4,32\]",
    ):
        fit(10, tmp_path, state=wider)


def test_run_folder_of_other_data_is_refused(tmp_path):
    fit(5, tmp_path)
    for feed, message in (
        (models.loader(seed=4), "seed was 3 and is 4"),
        (ps.Loader(models.data(), 4, shuffle=True, seed=3), "batch_size was 8 and is 4"),
        ((models.loader()[n] for n in range(9)), "generator"),
    ):
        with pytest.raises(ps.OtherRunError, match=rf"step-5 .*{message}.* name a new folder"):
            fit(10, tmp_path, feed=feed)


def test_number_that_the_state_cannot_hold_is_refused(tmp_path):
    for number, dtype in (
        (np.int64(2**40), "int32"),
        (np.array([1.0, 1e300]), "float32"),
        (np.uint64(2**32), "uint32"),
        (2**31, "int32"),
        (-(2**40), "int32"),
    ):
        for state in ({"n": number}, lambda number=number: {"n": number}):
            with pytest.raises(
                ValueError, match=rf"leaf 'n' of the state has .*, which {dtype} cannot hold: .* jax_enable_x64 is"
            ):
                fit(1, step=lambda state, batch: (state, {}), state=state)
    with pytest.raises(ValueError, match=r"leaf 'n' of the state has 1180591620717411303424, which int32 .* at most 64 bits"):
        fit(1, step=lambda state, batch: (state, {}), state={"n": 2**70})
    kept = {"a": np.float64(np.inf), "b": np.int64(-(2**31)), "c": np.float64(1e-300)}
    state = fit(1, step=lambda state, batch: (state, {}), state=kept)
    assert (float(state["a"]), int(state["b"]), float(state["c"])) == (np.inf, -(2**31), 0.0)


def test_run_folder_of_another_run_is_refused(tmp_path):
    fit(5, tmp_path, config={"rate": 0.1})
    with pytest.raises(ps.OtherRunError, match=r"rate was 0\.1 and is 0\.2"):
        fit(10, tmp_path, config={"rate": 0.2})


def test_folder_with_checkpoints_of_something_else_is_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ps.OtherRunError, match=r"no run\.json"):
        fit(5, tmp_path)


def test_run_folder_in_use_is_refused(tmp_path):
    errors = []

    def log(point):
        if point.kind == "train" and not errors:
            with pytest.raises(RuntimeError, match="another process") as caught:
                fit(5, tmp_path)
            errors.append(caught)

    fit(30, tmp_path, log=[log])
    assert errors


def test_number_that_a_plan_would_wrap_is_refused():
    def init():
        return {"w": jnp.zeros((4, 8)), "n": np.int64(2**40)}

    def step(state, batch):
        return {**state, "w": state["w"] + batch["x"].mean()}, {}

    plan = ps.plan(step, jax.eval_shape(init), jax.eval_shape(lambda: models.loader()[0]), mesh={"data": 8}, hardware="tpu-v5e")
    with pytest.raises(ValueError, match="leaf 'n' of the state has 1099511627776, which int32 cannot hold"):
        fit(1, step=step, state=init, plan=plan)


def test_restore_none_refuses_a_run_folder_with_checkpoints(tmp_path):
    fit(5, tmp_path)
    with pytest.raises(ValueError, match="up to step 5"):
        fit(10, tmp_path, restore=None)


def test_run_whose_checkpoints_are_all_damaged_is_refused_and_keeps_them(tmp_path):
    fit(20, tmp_path, save_every=10)
    for path in tmp_path.glob("checkpoints/*/record.json"):
        path.write_text("{}")
    for restore in ("latest", tmp_path):
        with pytest.raises(ps.CheckpointError, match=r"(?s)no checkpoint in .*step-20: record.json has 2 bytes.*step-10: "):
            fit(40, tmp_path if restore == "latest" else tmp_path / "new", restore=restore)
    assert len(list(tmp_path.glob("checkpoints/*/MANIFEST.json"))) == 2


def test_older_checkpoint_of_the_same_folder_is_refused(tmp_path):
    fit(20, tmp_path, save_every=10)
    with pytest.raises(ValueError, match="older than step-20"):
        fit(40, tmp_path, restore=tmp_path / "checkpoints/step-10")


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("restore", ["nowhere", "newest", "run/checkpoints/step-9"])
def test_checkpoint_that_is_not_there_is_refused(tmp_path, monkeypatch, trained, restore):
    monkeypatch.chdir(tmp_path)
    if trained:
        fit(4, tmp_path / "run")
    with pytest.raises(
        ps.CheckpointError, match=rf"restore='{restore}': checkpoint .*/{restore} cannot be used: there is no such folder"
    ):
        fit(4, tmp_path / "run", restore=restore)


def test_run_folder_without_a_checkpoint_is_refused_as_the_begin_of_another_run(tmp_path):
    fit(5, tmp_path / "a")
    for path in tmp_path.glob("a/checkpoints/*/MANIFEST.json"):
        path.unlink()
    for name in ("a", "a/checkpoints"):
        with pytest.raises(ps.CheckpointError, match=rf"restore='.*{name}': no save to .*/a/checkpoints has ended"):
            fit(9, tmp_path / "b", restore=tmp_path / name)


def test_checkpoint_of_another_run_is_refused_where_the_run_did_not_begin_from_it(tmp_path):
    fit(5, tmp_path / "a")
    fit(10, tmp_path / "b", restore=tmp_path / "a")
    fit(10, tmp_path / "c")
    for run, restore in (("c", "a"), ("c", "b/checkpoints/step-10"), ("a", "b"), ("b", "c")):
        with pytest.raises(ValueError, match=f"/{run} did not begin from there, and is at step .* restore='latest'"):
            fit(15, tmp_path / run, restore=tmp_path / restore)
    fit(15, tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    fit(20, tmp_path / "b", restore=tmp_path / "a")  # it had begun from there


def test_restore_best_is_the_best_checkpoint_of_the_run(tmp_path):
    def run(steps, **more):
        evaluation = ps.Evaluation(lambda state, batch: {"off": jnp.abs(state["n"] - 15)}, models.loader(epochs=1), every=5)
        settings = {"state": {"n": 0}, "evaluate": evaluation, "best": "min val_off", "keep": 1, "save_every": 5, **more}
        return int(fit(steps, tmp_path, step=lambda state, batch: ({"n": state["n"] + 1}, {}), **settings)["n"])

    for more in ({}, {"best": None}):
        with pytest.raises(ValueError, match=r"restore='best' needs best=, and checkpoint="):
            run(5, restore="best", **more)
    run(10)
    assert run(15, restore="best") == 15
    for name in ("checkpoints/step-15", "checkpoints", "."):
        assert run(15, restore=tmp_path / name) == 15
    run(25)
    with pytest.raises(ValueError, match=r"restore='best': step-15 is older than step-25 .*: name .*/step-15 with restore="):
        run(30, restore="best")


def test_feed_without_a_state_cannot_be_saved(tmp_path):
    with ps.feed(models.loader()[number] for number in range(10)) as feed, pytest.raises(TypeError, match="cannot be restored"):
        fit(5, tmp_path, feed)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"log_every": 0}, "log_every=0"),
        ({"save_every": 5}, "needs checkpoint="),
        ({"restore": True}, "needs 'latest'"),
        ({"checkpoint": "gs://bucket/run"}, "mount the bucket"),
        ({"checkpoint": ""}, "checkpoint='' is empty"),
        ({"checkpoint": b"runs"}, "checkpoint=b'runs': needs a path"),
        ({"restore": ""}, "restore='' is empty"),
        ({"stop": "min val_loss"}, "not a ps.EarlyStop"),
        ({"config": 3}, "not a dict of settings"),
        ({"config": {"f": jnp.tanh}}, r"config\['f'\] is a .* may differ from process to process"),
        ({"config": {"a": [{"b": {1}}]}}, r"config\['a'\]\[0\]\['b'\] is a set"),
        ({"log": [ps.log.progress]}, "ps.log.progress itself: call it"),
        ({"profile": (True, True)}, "first step, last step"),
        ({"state": {"w": np.zeros(2), "name": np.array(["a"])}}, "leaf 'name' of the state is a array of <U1"),
        ({"state": lambda: {"w": "text"}}, "leaf 'w' of the state is a str"),
        ({"best": "val_loss"}, "'min' or 'max'"),
        ({"best": "min val_loss"}, "needs evaluate="),
        ({"nonfinite": "raise"}, "choose from stop, skip, ignore"),
        ({"profile": (5, 3)}, "first step, last step"),
        ({"grace": 0}, "seconds > 0"),
        ({"log": print}, "not a list of loggers"),
        ({"evaluate": models.evaluation(5), "best": "min val_accuracy"}, "no metric 'val_accuracy'; it has val_loss"),
        ({"state": {"w": models.init()["w"], "f": jnp.tanh}}, "leaf 'f' of the state is a"),
        ({"state": {}}, "no arrays"),
        ({"feed": []}, "no batch"),
    ],
)
def test_bad_arguments_are_refused_before_training(settings, message):
    with pytest.raises((ValueError, TypeError), match=message), warnings.catch_warnings():
        fit(**{"steps": 10, **settings})


def test_run_folder_inside_of_a_checkpoint_is_refused(tmp_path):
    fit(10, tmp_path)
    with pytest.raises(ValueError, match="checkpoint, step-10: name the run folder"):
        fit(20, tmp_path / "checkpoints/step-10")


def test_feed_that_has_given_batches_is_refused_for_a_run_that_is_saved(tmp_path):
    with ps.feed(models.loader()) as feed:
        next(feed)
        fit(5, feed=feed)
        with pytest.raises(ValueError, match="give fit a feed of its own"):
            fit(10, tmp_path, feed)


@pytest.mark.parametrize("place", ["eight", "one"])
def test_state_on_other_devices_than_the_batches_is_refused(place):
    devices = jax.devices()[3] if place == "one" else NamedSharding(mesh(8), P())
    with pytest.raises(ValueError, match=r"the batches are on .* feed=ps.feed\(batches, to="):
        fit(5, state=jax.device_put({**models.init(), "step": jnp.int32(0)}, devices))


@pytest.mark.filterwarnings("ignore:.*compiles again")
def test_step_that_changes_the_state_for_batches_of_another_shape_is_an_error():
    loader = ps.Loader({"x": np.ones(20, np.float32)}, 8, epochs=1, remainder="keep")

    def step(state, batch):
        small = len(batch["x"]) < 8
        return {"w": state["w"].astype(jnp.bfloat16) if small else state["w"]}, {"m": 1.0}

    with pytest.raises(ps.StepError, match=r"w: float32\[\] → bfloat16\[\]"):
        fit(None, feed=loader, step=step, state={"w": 0.0})
    with pytest.raises(ps.StepError, match="metrics n for a batch with other shapes"):
        fit(None, feed=loader, step=lambda s, b: (s, {"m" if len(b["x"]) == 8 else "n": 1.0}), state={"w": 0.0})


def test_run_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"no folder to write to .* name another one"):
        fit(5, tmp_path / "file")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").touch()
    with pytest.raises(ps.OtherRunError, match=r"checkpoints is a file, .* name another folder"):
        fit(5, tmp_path / "run")
    (tmp_path / "run/checkpoints").unlink()
    (tmp_path / "run/checkpoints").symlink_to("nowhere")
    with pytest.raises(ps.OtherRunError, match=r"checkpoints is a link to nowhere, .* name another folder"):
        fit(5, tmp_path / "run")
    with pytest.raises(ValueError, match="has a NUL character"):
        fit(5, f"{tmp_path}/a\0b")
