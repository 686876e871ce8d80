"""Each framework's loader and measurement, at quick size."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from tests.extras import require

from penstock.run_command import nvidia_gpu
from penstock_bench import worker
from penstock_bench.step_clock import StepClock
from penstock_bench.suites import frameworks
from penstock_bench.suites.frameworks import find, jpeg, measure
from penstock_bench.suites.frameworks import reference as frameworks_reference
from penstock_bench.suites.frameworks.experiment import LEARNING_RATE, QUICK, Experiment, Geometry
from penstock_bench.suites.frameworks.random_images import RandomImages
from penstock_bench.suites.frameworks.weights import fixed_batch, initial, norm
from penstock_bench.suites.frameworks.workload import make_flax, make_keras, make_torch_eager

MAKERS = {"PyTorch": make_torch_eager, "JAX": make_flax, "Keras": make_keras}
NAME = "vit-tiny-b4-fp32-eager-sgd-random"
SECONDS = ("seconds to import and build", "seconds to the end of the first step, with compilation")


def loaded(framework: str, data: str, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of a framework's loader, with channels last."""
    if framework == "PyTorch":
        require("torch")
    if data == "jpeg":
        require("PIL")
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


@pytest.mark.parametrize("framework", ["JAX", "Keras", pytest.param("PyTorch", marks=pytest.mark.slow)])
def test_jpegs_are_decoded_alike_over_and_over(framework):
    batches = loaded(framework, "jpeg", 3)
    with jpeg.folder(8) as paths:
        expected = np.stack([jpeg.decode(paths[index % 8], QUICK.image) for index in range(12)])
    images = np.concatenate([images for images, _ in batches])
    assert images.dtype == np.float32
    np.testing.assert_array_equal(images, expected)
    assert np.concatenate([labels for _, labels in batches]).tolist() == list(range(12))


def test_jpegs_are_the_same_in_every_process_and_no_two_alike():
    require("PIL")
    with jpeg.folder(3) as first, jpeg.folder(3) as second:
        contents = [[Path(path).read_bytes() for path in paths] for paths in (first, second)]
    assert contents[0] == contents[1]
    assert len(set(contents[0])) == 3


def test_jpegs_are_made_once_where_there_is_a_cache(tmp_path, monkeypatch):
    require("PIL")
    monkeypatch.setenv("PENSTOCK_BENCH_CACHE", str(tmp_path / "cache"))
    with jpeg.folder(3) as first:
        made = [Path(path).stat().st_mtime_ns for path in first]
    with jpeg.folder(3) as second, jpeg.folder(2) as fewer:
        assert (second, len(fewer)) == (first, 2)
        assert [Path(path).stat().st_mtime_ns for path in second] == made
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["jpeg-2", "jpeg-3"]


def test_a_record_is_the_same_in_every_framework_and_whenever_it_is_read():
    require("torch")
    from penstock_bench.suites.frameworks import torch_data

    source = RandomImages(8, 5)
    batch = source.read(np.array([7, 3]))
    np.testing.assert_array_equal(batch.images, source.read(np.array([3, 7])).images[::-1])
    assert batch.labels.tolist() == [2, 3]
    ours, label = torch_data.RandomImages(Geometry(width=32, depth=1, heads=1, image=8, patch=4, classes=5))[7]
    assert label == 2
    np.testing.assert_array_equal(np.sort(ours.numpy(), axis=None), np.sort(batch.images[0], axis=None))  # in other layouts


def check(result, workload, reference):
    """Check the values that every process must have, as the worker writes them."""
    assert {*result["steps"]} == {metric.name for metric in workload.metrics}
    assert all(min(blocks) > 0 for blocks in result["steps"].values())
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


def run_alone(workload, variant):
    if "orch" in variant:
        require("torch")
    measured = worker._alone(workload.variant(variant), workload.sizes["quick"], dataclasses.replace(workload, block_seconds=0.0))
    gc.unfreeze()
    return dataclasses.asdict(measured)


@pytest.mark.parametrize(
    "variant",
    ["PyTorch eager", "JAX", *(pytest.param(name, marks=pytest.mark.slow) for name in ("torch.compile", "Keras on JAX"))],
)
def test_a_process_gives_times_and_what_all_must_have_alike(variant, reference):
    workload = find(NAME)
    check(run_alone(workload, variant), workload, reference)


@pytest.mark.parametrize(
    "variant", ["PyTorch eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("JAX", "Keras on JAX"))]
)
def test_a_process_whose_steps_take_seconds_gives_the_same(variant, reference, monkeypatch):
    monkeypatch.setattr(measure, "_takes_seconds", lambda experiment, size: True)
    test_a_process_gives_times_and_what_all_must_have_alike(variant, reference)


class Paced:
    """A trainer whose steps and loader take given times, by a clock of its own."""

    warm_up = 2

    def __init__(self, step: float, loading: float, monkeypatch):
        self.details, self.now = {}, 0.0
        self._step, self._loading = step, loading
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)
        clock = functools.partial(StepClock, now=lambda: self.now)
        monkeypatch.setattr(measure, "StepClock", clock)

    def place(self, batch):
        return "placed"

    def loss(self, batch):
        self.now += self._step
        return 1.0

    def train(self, batches, clock):
        clock.begin()
        for batch in batches:
            self.loss(batch)
            clock.ended()
            if not clock.more():
                break
        clock.finish()

    def weights(self):
        return {}

    @contextlib.contextmanager
    def loader(self):
        """Ten batches are ready whenever a block begins."""
        self.ready = 10

        def batches():
            while True:
                self.now += 0.0 if self.ready > 0 else self._loading
                self.ready -= 1
                yield "loaded"

        yield batches()

    def wait(self, batch):
        pass


@pytest.mark.parametrize(("step", "loading", "together"), [(0.5, 0.02, 0.5), (0.02, 0.05, 0.07)])
def test_a_loader_that_is_behind_has_no_gain_from_batches_that_it_made_before_the_block(step, loading, together, monkeypatch):
    trainer = Paced(step, loading, monkeypatch)
    with measure.live(lambda experiment, size: trainer, Experiment.parse(NAME), find(NAME).sizes["quick"]) as live:
        trainer.ready = 10
        assert live.blocks["together"](0.3) == pytest.approx(together * 1e3)
        trainer.ready = 10
        assert live.blocks["loading"](0.3) == pytest.approx(loading * 1e3)
        assert live.blocks["compute"](0.3) == pytest.approx(step * 1e3)
    gc.unfreeze()


@pytest.mark.slow
def test_a_run_in_another_interpreter_does_so_too(reference, tmp_path):
    """PyTorch/XLA, as far as its environment is there; its loader's threads must end, or the process would not."""
    workload = find(NAME)
    for variant in workload.variants:
        if variant.environment is not None and not variant.environment.lacks(variant.requires):
            path = tmp_path / "result.json"
            command = [variant.environment.python, worker.__file__, frameworks.__name__, NAME, variant.name, "quick"]
            subprocess.run([*command, "--result", path], check=True, timeout=200)
            check(json.loads(path.read_text()), workload, reference)
