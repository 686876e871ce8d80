"""Each framework's loader and measurement, at quick size."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from penstock.bench.suites.frameworks import find, jpeg
from penstock.bench.suites.frameworks.experiment import QUICK, Experiment
from penstock.bench.suites.frameworks.random_images import RandomImages
from penstock.bench.suites.frameworks.workload import make_flax, make_keras, make_torch_eager

MAKERS = {"PyTorch": make_torch_eager, "JAX": make_flax, "Keras": make_keras}
NAME = "vit-tiny-b4-fp32-eager-sgd-random"


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


def test_a_record_read_twice_is_the_same_twice():
    source = RandomImages(8, 5)
    indices = np.array([7, 3])
    np.testing.assert_array_equal(source.read(indices).images, source.read(indices).images)
    assert source.read(indices).labels.tolist() == [2, 3]


@pytest.mark.parametrize("variant", ["PyTorch eager", "JAX", "Keras on JAX"])
def test_a_run_gives_times_of_steps_and_the_loss_that_all_must_have(variant, reference):
    workload = find(NAME)
    measured = workload.variant(variant).measure(workload.sizes["quick"])
    gc.unfreeze()
    assert {*measured.steps, *measured.values} == {metric.name for metric in workload.metrics}
    assert measured.values["loading"] > 0
    assert all(len(steps) == 3 and min(steps) > 0 for steps in measured.steps.values())
    # The batch is as large as the one that is compared, so the loss is the first of those.
    assert measured.evidence["loss"] == pytest.approx(reference(NAME)["loss"][0], rel=1e-5)
    assert {"device", "threads"} <= set(measured.details)
