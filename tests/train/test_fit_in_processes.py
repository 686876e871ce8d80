"""Several processes train as one does, continue in any number, stop at the same step, and find what cannot work."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.train.ranks import launch

SCRIPT = """
import json, os, signal, sys
import jax, numpy as np, penstock as ps
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
sys.path.insert(0, {root!r})
from tests.train import models
processes = ps.distributed()
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
folder, steps = sys.argv[1], int(sys.argv[2])
losses = []
def log(point):
    if point.kind == "train":
        losses.append(point.metrics["loss"])
def fit(feed=None, **settings):
    with ps.feed(models.loader() if feed is None else feed, to=NamedSharding(mesh, P("data"))) as batches:
        return ps.fit(models.step, models.init, batches, steps=steps, checkpoint=folder,
                      **{{"log": [log], "log_every": 1, "save_every": 10, **settings}})
def show(state):
    host = jax.tree.map(np.asarray, (state["w"], state["seen"]))
    if processes.index == 0:
        print(json.dumps({{"w": host[0]["a"].tolist(), "seen": host[1].tolist(), "losses": losses}}))
"""


def run(tmp_path, rest, count, folder, steps):
    """Run a script in `count` processes with 8 devices in all."""
    root = str(Path(__file__).parents[2])
    script = SCRIPT.format(root=root) + rest
    options = ("--devices-per-process", str(8 // count))
    return launch(tmp_path, script, *options, count=count, arguments=(str(tmp_path / folder), str(steps)))


def result(done):
    assert done.code == 0, done.err
    return {name: np.asarray(value) for name, value in json.loads(done.lines(0)[-1]).items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Train 30 steps in one process with 8 devices."""
    return result(run(tmp_path_factory.mktemp("alone"), "show(fit())", 1, "run", 30))


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(tmp_path, alone):
    both = result(run(tmp_path, "show(fit(evaluate=models.evaluation(15), best='min val_loss'))", 2, "run", 30))
    np.testing.assert_allclose(both["losses"], alone["losses"], atol=1e-6)
    assert np.array_equal(both["seen"], alone["seen"])


@pytest.mark.slow
def test_run_continues_in_other_numbers_of_processes(tmp_path, alone):
    for count, steps in ((1, 9), (2, 21), (1, 30)):
        last = result(run(tmp_path, "show(fit())", count, "run", steps))
    np.testing.assert_allclose(last["w"], alone["w"], atol=1e-5)
    assert np.array_equal(last["seen"], alone["seen"])


@pytest.mark.slow
def test_signal_to_one_process_stops_all_at_the_same_step(tmp_path, alone):
    stop = """
def stop(point):
    if point.kind == "train" and point.step == 12:
        os.kill(os.getpid(), signal.SIGTERM)
show(fit(log=[log, stop]))
"""
    done = run(tmp_path, stop, 2, "run", 30)
    assert done.code == 0, done.err
    assert "SIGTERM: saved at step " in done.err
    assert "seen" not in done.out
    last = result(run(tmp_path, "show(fit())", 2, "run", 30))
    np.testing.assert_allclose(last["w"], alone["w"], atol=1e-5)
    assert np.array_equal(last["seen"], alone["seen"])


@pytest.mark.slow
def test_error_of_process_0_is_an_error_in_all(tmp_path):
    result(run(tmp_path, "show(fit())", 1, "run", 5))
    done = run(tmp_path, "show(fit(config={'rate': 1}))", 2, "run", 10)
    assert done.code == 1
    assert "OtherRunError" in done.err


@pytest.mark.slow
def test_early_end_of_the_feed_is_said_by_process_0_and_unusable_checkpoints_are_refused_by_all(tmp_path):
    done = run(tmp_path, "show(fit(models.loader(epochs=1)))", 2, "run", 30)
    assert len(result(done)["losses"]) == 12
    assert done.err.count("the feed ended after 12 of 30 steps") == 1
    for path in tmp_path.glob("run/checkpoints/*/state/*"):
        path.unlink() if path.is_file() else shutil.rmtree(path)
    refused = """
for restore in ("latest", "best", folder, folder + "/nowhere"):
    try:
        fit(restore=restore)
    except ps.CheckpointError as error:
        print("refused", str(error).partition(":")[0])
"""
    done = run(tmp_path, refused, 2, "run", 30)
    assert done.code == 0, done.err
    for rank in range(2):
        assert [line for line in done.lines(rank) if "refused" in line] == [
            f"refused no checkpoint in {tmp_path}/run/checkpoints can be used"
        ] * 4


@pytest.mark.slow
def test_different_plans_are_refused(tmp_path):
    plan = """
shapes = {{"data": 8}} if processes.index else {{"data": 2, "model": 4}}
batch = jax.eval_shape(lambda: models.loader(process=(0, 1))[0])
plan = ps.plan(models.step, jax.eval_shape(models.init), batch, mesh=shapes, hardware="tpu-v5e")
ps.fit(models.step, models.init, models.loader(), steps=4, plan=plan, log=[])
""".replace("{{", "{").replace("}}", "}")
    done = run(tmp_path, plan, 2, "run", 4)
    assert done.code == 1
    assert "plan" in done.err
    assert "process" in done.err


@pytest.mark.slow
def test_batch_that_does_not_divide_over_the_processes_is_refused(tmp_path):
    done = run(tmp_path, "fit(ps.Loader(models.data(), 12))", 2, "run", 4)
    assert done.code == 1
    assert "12 records do not divide over mesh axis 'data' (size 8)" in done.err


@pytest.mark.slow
def test_batches_on_the_devices_of_one_process_are_refused(tmp_path):
    done = run(tmp_path, "ps.fit(models.step, models.init, models.loader(), steps=3, log=[])", 2, "run", 3)
    assert done.code != 0
    assert "each of the 2 processes would train by itself: give plan=" in done.err
