"""`penstock.ray`: real workers of Ray train together, are killed, and continue."""

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import ray_jobs
from tests.extras import require
from tests.train import models

import penstock as ps
import penstock.ray as pr
from penstock.ray import _versions, _worker
from penstock.ray._run import final_error
from penstock.ray._worker import usable

RayActorError = require("ray.exceptions").RayActorError
WorkerGroupError = require("ray.train.v2.api.exceptions").WorkerGroupError
ROOT = Path(__file__).parent.parent
# Ray's own modules use names that Ray has deprecated, and Ray starts its programs from a process that uses JAX.
pytestmark = [
    pytest.mark.timeout(600),  # the first one starts Ray
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\."),
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),
]


@given(st.integers(1, 40), st.integers(1, 200), st.integers(1, 8))
def test_as_many_workers_train_as_the_batch_divides_over(workers, batch_size, devices):
    count = usable(workers, batch_size, devices)
    divides = [each for each in range(1, workers + 1) if batch_size % (each * devices) == 0]
    assert count == max(divides, default=0)
    assert usable(workers, None, devices) == workers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": (3, 2)}, r"workers=\(3, 2\): needs 1 <= least <= most"),
        ({"workers": (1, 2, 3)}, "needs a number of workers"),
        ({"workers": 2, "resources": {"CPU": 0}}, "needs amounts > 0"),
        ({"workers": 2, "devices": 0}, "devices=0: needs an integer >= 1"),
        ({"workers": 2, "failures": -1}, "failures=-1: needs an integer >= 0"),
        ({"workers": 3, "batch_size": 64}, "batch_size=64 .*workers=3: .*such as 63"),
        ({"workers": (2, 3), "batch_size": 9, "devices": 2}, "with 2 devices each: use a multiple of 4, such as 8"),
    ],
)
def test_unusable_arguments_are_refused_before_ray_starts(arguments, message):
    with pytest.raises(ValueError, match=message):
        pr.run(print, **arguments)


def test_a_train_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match="train=3 is not a function"):
        pr.run(3, workers=2)


@pytest.mark.parametrize(("found", "message"), [(None, "which is not installed"), ("2.40.0", "this is Ray 2.40.0")])
def test_a_missing_or_old_ray_is_named_with_the_command(monkeypatch, found, message):
    monkeypatch.setattr(_versions, "installed", lambda distribution: found)
    for call in (lambda: pr.run(print, workers=1), lambda: pr.source(None), pr.report):
        with pytest.raises(ImportError, match=rf'{message}.*pip install "ray\[train\]>=2\.60,<3\.0"'):
            call()


def test_errors_that_would_come_again_end_a_run_unless_a_worker_died():
    assert isinstance(final_error({0: RuntimeError(), 1: ValueError()}), ValueError)
    assert final_error({0: RuntimeError("Gloo all-reduce failed: connection reset by peer")}) is None
    assert final_error({0: ValueError(), 1: RayActorError()}) is None


def test_a_dataset_in_place_of_a_source_is_told_where_to_go():
    Dataset = type("Dataset", (), {"__module__": "ray.data.dataset"})  # noqa: N806
    with pytest.raises(TypeError, match=r"give penstock\.ray\.source\(dataset\)"):
        ps.Loader(Dataset(), 8)


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    """A Ray of this machine, for all tests of this module."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.delenv("XLA_FLAGS", raising=False)
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        yield ray
        ray.shutdown()


@pytest.fixture
def run(ray, tmp_path):
    """`run` with few resources, and Ray's records in a folder of the test."""
    return lambda train, config, **settings: pr.run(train, config, **{"workers": 2, "storage": tmp_path / "ray", **settings})


@pytest.fixture(scope="module")
def records(ray):
    """The records of the models, in blocks of a dataset."""
    data = models.data()
    items = [{name: column[i] for name, column in data.items()} for i in range(models.RECORDS)]
    return pr.source(ray.data.from_items(items, override_num_blocks=7))


@pytest.fixture(scope="module")
def straight(ray, records, tmp_path_factory):
    """A run of two workers that nothing breaks."""
    folder = tmp_path_factory.mktemp("straight")
    return pr.run(ray_jobs.fit, {"folder": f"{folder}/run", "data": records}, workers=2, storage=folder)


def places(folder):
    return [line.split() for line in Path(f"{folder}.places").read_text().splitlines()]


@pytest.mark.slow
def test_workers_train_together_and_report(straight):
    assert straight.workers == 2
    assert np.array_equal(straight.value["seen"][:48], models.ideal(48))
    assert straight.metrics["step"] == 48
    assert straight.metrics["loss"] > 0
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(straight.value))


@pytest.mark.slow
def test_a_run_whose_worker_was_killed_ends_as_one_that_was_not(run, records, straight, tmp_path):
    """Process 1 is killed; in the example of Ray it is process 0."""
    folder = tmp_path / "run"
    result = run(ray_jobs.fit, {"folder": str(folder), "data": records, "kill": 1, "pause": 0.1})
    assert Path(f"{folder}.killed").exists()
    assert len(places(folder)) == 4
    assert models.equal(result.value, straight.value)
    steps = [json.loads(line)["step"] for line in Path(f"{folder}.jsonl").read_text().splitlines()]
    # The metrics of an interval are written while the next one runs, so the last before a kill may be missing.
    assert [*range(4, 13, 4), *range(20, 49, 4)] == [step for step in steps if step != 16]


@pytest.mark.slow
def test_a_worker_sees_its_place_its_devices_and_the_folder_of_the_driver(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(ray_jobs.where, {"folder": "relative"}, devices=3)
    assert result.value == ("process 0 of 2 with 3 devices (Ray", str(tmp_path), 6)
    assert (tmp_path / "relative").is_dir()


@pytest.mark.slow
def test_workers_over_which_the_batch_does_not_divide_stay_idle(run, tmp_path, straight):
    folder = tmp_path / "run"
    result = run(ray_jobs.fit, {"folder": str(folder)}, workers=(2, 3), batch_size=models.BATCH)
    assert result.workers == 2
    assert sorted(place[0] for place in places(folder)) == ["0", "1"]
    assert models.equal(result.value, straight.value)


@pytest.mark.slow
@pytest.mark.parametrize(("error", "raised", "attempts"), [(ValueError, ValueError, 2), (OSError, WorkerGroupError, 4)])
def test_only_errors_that_may_pass_are_tried_again(run, tmp_path, error, raised, attempts):
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(raised, match="no such thing") as caught:
        run(ray_jobs.fail, {"folder": str(tmp_path), "error": error}, failures=1)
    if error is raised:
        assert "raise error" in "".join(caught.value.__notes__)
    assert (tmp_path / "attempts").read_text().count("attempt") == attempts  # of two workers
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_an_error_at_once(run, tmp_path):
    with pytest.raises(ValueError, match="9"):
        run(ray_jobs.fit, {"folder": str(tmp_path / "run"), "batch_size": 9})
    assert len(places(tmp_path / "run")) == 2


@pytest.mark.slow
def test_an_array_of_which_process_0_has_a_part_cannot_be_returned(run):
    with pytest.raises(TypeError, match=r"returned 'w' of shape \[4\], of which process 0 has only a part"):
        run(ray_jobs.sharded, {})


@pytest.mark.slow
def test_more_workers_than_the_cluster_can_have_are_an_error(run):
    message = r"9 workers with 1 CPU each found no room in 1 s; the cluster has 4 CPU \(4 free\) on 1 node"
    with pytest.raises(ps.DistributedError, match=message):
        run(print, {}, workers=9, timeout=1)


@pytest.mark.slow
def test_a_report_gives_the_last_value_of_each_metric(ray):
    _worker.last_values.clear()
    logger = pr.report()
    logger(ps.Point("begin", 0, 10))
    logger(ps.Point("train", 5, 10, {"loss": 2.0, "top-5/accuracy": 0.5}, speed=3.0, input_wait=0.0))
    logger(ps.Point("evaluation", 5, 10, {"val_loss": 1.0}))
    assert _worker.last_values == {
        "step": 5,
        "loss": 2.0,
        "top-5/accuracy": 0.5,
        "steps_per_second": 3.0,
        "input_wait": 0.0,
        "val_loss": 1.0,
    }


@pytest.mark.slow
def test_a_source_reads_any_records_in_the_order_of_the_dataset(records):
    data = models.data()
    assert len(records) == models.RECORDS
    indices = np.random.default_rng(0).integers(0, models.RECORDS, 300)
    for source in (records, pickle.loads(ray_pickle(records))):
        batch = source.read(indices)
        assert {name: column.dtype for name, column in batch.items()} == {name: column.dtype for name, column in data.items()}
        assert all(np.array_equal(batch[name], column[indices]) for name, column in data.items())
    assert records.read(np.arange(0))["x"].shape == (0, 4)
    assert records.describe() == "a Ray dataset of 100 records: id int32[], x float32[4], y float32[1]"


def ray_pickle(value):
    from ray import cloudpickle

    return cloudpickle.dumps(value)


@pytest.mark.slow
def test_the_order_of_a_dataset_is_that_of_its_input_however_it_is_computed(ray):
    import time

    def late(batch):
        time.sleep(0.3 if batch["id"][0] == 0 else 0.0)  # the first block is ready last
        return batch

    source = pr.source(ray.data.range(64, override_num_blocks=8).map_batches(late, batch_size=None))
    assert source.read(np.arange(64))["id"].tolist() == list(range(64))


@pytest.mark.slow
def test_a_source_holds_on_to_few_blocks(ray, monkeypatch):
    monkeypatch.setattr("penstock.ray._source._HELD", 250)
    source = pr.source(ray.data.range(64, override_num_blocks=8))  # 64 bytes a block
    assert source.read(np.arange(64)[::-1])["id"].tolist() == list(range(64))[::-1]
    assert len(source._held) == 3


@pytest.mark.slow
def test_datasets_that_no_loader_can_read_are_refused(ray):
    with pytest.raises(TypeError, match=r"needs a ray\.data\.Dataset, got a list"):
        pr.source([1])
    with pytest.raises(TypeError, match=r"column 'text' of the dataset has no numbers .*drop_columns\(\['text'\]\)"):
        pr.source(ray.data.from_items([{"x": 1, "text": "a"}]))
    with pytest.raises(ValueError, match="has no records"):
        pr.source(ray.data.range(10).limit(0))
    numbers = ray.data.from_numpy([np.zeros((2, 3)), np.zeros((2, 4))])
    with pytest.raises((TypeError, ValueError), match="column 'data'"):
        pr.source(numbers)


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "begun"), [("gain lose", [1, 2, 1]), ("drain", [2, 1])])
def test_a_run_continues_on_more_and_fewer_nodes(changes, begun, straight, tmp_path):
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "4", "XLA_FLAGS": ""}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "tests.ray_jobs", str(tmp_path), *changes.split()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert f"workers {begun[-1]}" in done.stdout
    counts = [int(place[2]) for place in places(tmp_path / "run") if place[0] == "0"]
    assert counts == begun
    first, *later = map(int, (tmp_path / "run.begun").read_text().split())
    assert first == 0
    assert min(later) > 0  # where a node was drained, only the preemption can have saved: the next checkpoint was far away
    assert later == sorted(later)
    with np.load(tmp_path / "result.npz") as result:
        assert np.array_equal(result["seen"][:48], models.ideal(48))
        if changes == "drain":
            np.testing.assert_allclose(result["w"], straight.value["w"]["a"], rtol=1e-5, atol=1e-6)
