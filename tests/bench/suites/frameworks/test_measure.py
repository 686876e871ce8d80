"""Each framework's loader and measurement, at quick size."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from penstock._gpu import nvidia_gpu
from penstock.bench import worker
from penstock.bench.step_clock import StepClock
from penstock.bench.suites import frameworks
from penstock.bench.suites.frameworks import find, jpeg, measure, torch_data
from penstock.bench.suites.frameworks import reference as frameworks_reference
from penstock.bench.suites.frameworks.experiment import LEARNING_RATE, QUICK, Experiment, Geometry
from penstock.bench.suites.frameworks.random_images import RandomImages
from penstock.bench.suites.frameworks.weights import fixed_batch, initial, norm
from penstock.bench.suites.frameworks.workload import make_flax, make_keras, make_torch_eager

MAKERS = {"PyTorch": make_torch_eager, "JAX": make_flax, "Keras": make_keras}
NAME = "vit-tiny-b4-fp32-eager-sgd-random"
SECONDS = ("seconds to import and build", "seconds to the end of the first step, with compilation")


def loaded(framework: str, data: str, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of a framework's loader, with channels last."""
    experiment = Experiment("tiny", 4, "fp32", "eager", "sgd", data)
    trainer = MAKERS[framework](experiment, find(experiment.name).sizes["quick"])
    found = []
    with trainer.loader() as batches:
        for images, labels in batches:
            trainer.wait((images, labels))
            found.append((np.asarray(images), np.asarray(labels)))
            if len(found) == count:
                break
    if framework == "PyTorch":
        assert found[0][0].shape == (4, 3, QUICK.image, QUICK.image)
        assert found[0][1].dtype == np.int64
        return [(images.transpose(0, 2, 3, 1), labels) for images, labels in found]
    assert found[0][1].dtype == np.int32
    return found


@pytest.mark.parametrize("framework", MAKERS)
def test_random_records_are_normal_and_labelled_by_their_index(framework):
    batches = loaded(framework, "random", 3)
    images = np.stack([images for images, _ in batches])
    assert images.shape == (3, 4, QUICK.image, QUICK.image, 3)
    assert images.dtype == np.float32
    assert abs(images.mean()) < 0.02
    assert abs(images.std() - 1) < 0.02
    assert len({image.tobytes() for image in images.reshape(12, -1)}) == 12
    assert np.concatenate([labels for _, labels in batches]).tolist() == list(range(12))


@pytest.mark.parametrize("framework", MAKERS)
def test_jpegs_are_decoded_alike_over_and_over(framework):
    batches = loaded(framework, "jpeg", 3)
    with jpeg.folder(8) as paths:
        expected = np.stack([jpeg.decode(paths[index % 8], QUICK.image) for index in range(12)])
    images = np.concatenate([images for images, _ in batches])
    assert images.dtype == np.float32
    np.testing.assert_array_equal(images, expected)
    assert np.concatenate([labels for _, labels in batches]).tolist() == list(range(12))


def test_jpegs_are_the_same_in_every_process_and_no_two_alike():
    with jpeg.folder(3) as first, jpeg.folder(3) as second:
        contents = [[Path(path).read_bytes() for path in paths] for paths in (first, second)]
    assert contents[0] == contents[1]
    assert len(set(contents[0])) == 3


def test_jpegs_are_made_once_where_there_is_a_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_BENCH_CACHE", str(tmp_path / "cache"))
    with jpeg.folder(3) as first:
        made = [Path(path).stat().st_mtime_ns for path in first]
    with jpeg.folder(3) as second, jpeg.folder(2) as fewer:
        assert (second, len(fewer)) == (first, 2)
        assert [Path(path).stat().st_mtime_ns for path in second] == made
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["jpeg-2", "jpeg-3"]


def test_a_record_is_the_same_in_every_framework_and_whenever_it_is_read():
    source = RandomImages(8, 5)
    batch = source.read(np.array([7, 3]))
    np.testing.assert_array_equal(batch.images, source.read(np.array([3, 7])).images[::-1])
    assert batch.labels.tolist() == [2, 3]
    ours, label = torch_data.RandomImages(Geometry(width=32, depth=1, heads=1, image=8, patch=4, classes=5))[7]
    assert label == 2
    np.testing.assert_array_equal(np.sort(ours.numpy(), axis=None), np.sort(batch.images[0], axis=None))  # in other layouts


def check(result, workload, reference):
    """Check the values that every run must have, as the worker writes them."""
    assert {*result["steps"], *result["values"]} == {metric.name for metric in workload.metrics}
    assert all(len(steps) == 3 and min(steps) > 0 for steps in result["steps"].values())
    assert result["values"]["loading"] > 0
    assert result["values"]["together"] == pytest.approx(np.mean(result["steps"]["together"]))
    # The batch is as large as the one that is compared, so the loss is the first of those.
    evidence, tolerances = result["evidence"], workload.agreement.tolerances
    assert evidence["loss"] == pytest.approx(reference(NAME)["loss"][0], rel=tolerances["loss"])
    assert evidence["update"] == pytest.approx(first_update(), rel=tolerances["update"])
    details = result["details"]
    assert (
        {"device", "versions", "compile cache", *SECONDS}
        <= {*details}
        <= {"device", "versions", "compile cache", "threads", *SECONDS}
    )
    assert nvidia_gpu() or details["device"] == "cpu: cpu"
    assert details["versions"]


@functools.cache
def first_update() -> float:
    """The norm of what the first step changes, in float64."""
    experiment, before = Experiment.parse(NAME), initial(QUICK)
    with jax.enable_x64(True):
        images, labels = fixed_batch(QUICK, experiment.batch)
        params = {name: value.astype(np.float64) for name, value in before.items()}
        gradients, _ = jax.grad(frameworks_reference._loss, has_aux=True)(params, images.astype(np.float64), labels, QUICK)
        return LEARNING_RATE * norm({name: np.asarray(gradient) for name, gradient in gradients.items()})


@pytest.mark.parametrize("variant", ["PyTorch eager", "torch.compile", "JAX", "Keras on JAX"])
def test_a_run_gives_times_and_what_all_must_have_alike(variant, reference):
    workload = find(NAME)
    measured = workload.variant(variant).measure(workload.sizes["quick"])
    gc.unfreeze()
    check(dataclasses.asdict(measured), workload, reference)


@pytest.mark.parametrize("variant", ["PyTorch eager", "JAX", "Keras on JAX"])
def test_a_run_whose_steps_take_seconds_gives_the_same(variant, reference, monkeypatch):
    monkeypatch.setattr(measure, "_takes_seconds", lambda experiment, size: True)
    test_a_run_gives_times_and_what_all_must_have_alike(variant, reference)


@pytest.mark.parametrize("framework", MAKERS)
def test_training_looks_ahead_as_far_as_it_says(framework):
    experiment = Experiment.parse(NAME)
    trainer = MAKERS[framework](experiment, find(NAME).sizes["quick"])
    taken: list[int] = []

    class Clock(StepClock):
        """Remembers how many batches were taken when the first step was queued or had ended."""

        at_first_step: int | None = None

        def more(self) -> bool:
            self.at_first_step = len(taken) if self.at_first_step is None else self.at_first_step
            return super().more()

    def batches():
        batch = trainer.place(fixed_batch(QUICK, experiment.batch))
        for number in itertools.count():
            taken.append(number)
            yield batch

    clock = Clock(3, 3, 0, alone=True)
    trainer.train(batches(), clock)
    assert clock.at_first_step == 1 + trainer.looks_ahead


class Logged:
    """A trainer that computes nothing and tells what is asked of it."""

    warm_up, looks_ahead = 2, 1

    def __init__(self):
        self.details, self.log = {}, []

    def place(self, batch):
        return "placed"

    def loss(self, batch):
        self.log.append("step")
        return 1.0

    def train(self, batches, clock):
        clock.begin()
        for batch in batches:
            self.log.append(f"train {batch}")
            clock.ended()
            if not clock.more():
                break
        clock.finish()

    def weights(self):
        return {}

    @contextlib.contextmanager
    def loader(self):
        self.log.append("open")
        yield map(str, itertools.count())
        self.log.append("close")

    def wait(self, batch):
        self.log.append(f"wait {batch}")


@pytest.mark.parametrize("seconds", [False, True])
def test_a_step_that_is_timed_alone_finds_its_loader_started(seconds, monkeypatch):
    monkeypatch.setattr(measure, "_takes_seconds", lambda experiment, size: seconds)
    logged = Logged()
    size = dataclasses.replace(find(NAME).sizes["quick"], least=1, most=1)
    measure.measure(lambda experiment, size: logged, Experiment.parse(NAME), size)
    gc.unfreeze()
    loading = ["open", "wait 0", "wait 1", "close"]
    if seconds:  # the batch that was waited for is one that the trainer looks ahead for
        assert logged.log == ["open", "wait 0", "step", "step", "train placed", "train 0", "close", *loading]
    else:  # of two steps, one is timed
        alone, together = ["train placed"] * 2, ["open", "train 0", "train 1", "close"]
        assert logged.log == ["step", "step", *alone, *together, *loading]


def test_a_run_in_another_interpreter_does_so_too(reference, tmp_path):
    """PyTorch/XLA, as far as its environment is there; its loader's threads must end, or the process would not."""
    workload = find(NAME)
    for variant in workload.variants:
        if variant.environment is not None and not variant.environment.lacks(variant.requires):
            path = tmp_path / "result.json"
            command = [variant.environment.python, worker.__file__, frameworks.__name__, NAME, variant.name, "quick"]
            subprocess.run([*command, "--result", path], check=True, timeout=200)
            check(json.loads(path.read_text()), workload, reference)
