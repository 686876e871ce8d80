"""A verification that cannot fail verifies nothing: each test breaks a pipeline in one way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.tests.suites.feed.one_block import one_block

from penstock_bench.model import VerificationError
from penstock_bench.suites.feed import images
from penstock_bench.suites.feed.image_pipelines import BATCH, numpy_loop, penstock, penstock_host
from penstock_bench.suites.feed.images import Size

_SIZE = Size(records=5 * BATCH + 3, slow_records=2 * BATCH + 3)


def _broken(change):
    """The NumPy loop with its list of an epoch's batches changed."""

    def make(records, device, seed):
        return lambda number: iter(change(list(numpy_loop(records, device, seed)(number))))

    return make


def _leaf(name, fn):
    return _broken(lambda batches: [batches[0], {**batches[1], name: fn(batches[1][name])}, *batches[2:]])


@pytest.mark.parametrize("make", [numpy_loop, penstock, penstock_host])
@pytest.mark.parametrize("slow", [False, True])
def test_correct_pipelines_pass(make, slow):
    measured = one_block(images.live(make, slow, _SIZE))
    assert measured.values["throughput"] > 0
    assert measured.details["timed_rows"] == (2 if slow else 5) * BATCH


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_broken(lambda batches: [batches[0], *batches[:-1]]), "comes 2 times"),
        (_broken(lambda batches: batches[:-1]), "has 4 batches, not 5"),
        (_broken(lambda batches: [*batches, batches[0]]), "has 6 batches, not 5"),
        (_leaf("image", lambda x: x.at[3].set(x[4])), "label is not|comes 2 times"),
        (_leaf("image", lambda x: x.astype(jnp.bfloat16)), "image is bfloat16"),
        (_leaf("image", lambda x: x * 255), r"not in \[0, 1\]"),
        (_leaf("image", lambda x: x - 0.001), r"not in \[0, 1\]"),
        (_leaf("image", lambda x: x.at[0, 20, 20, 0].set(1 - x[0, 20, 20, 0])), "not its record's divided"),
        (_leaf("image", lambda x: x * 0.999), "not its record's divided"),
        (_leaf("image", lambda x: x[..., 0]), r"float32\[128, 28, 28\]"),
        (_leaf("image", lambda x: x[:100]), r"float32\[100, 28, 28, 1\]"),
        (_leaf("image", np.asarray), "not a jax.Array"),
        (_leaf("image", lambda x: jax.device_put(x, jax.devices()[1])), "is on"),
        (_leaf("label", lambda x: jnp.roll(x, 1)), "label is not its record's"),
        (_leaf("label", lambda x: x.astype(jnp.float32)), "label is float32"),
        (_broken(lambda batches: [{"image": batch["image"]} for batch in batches]), "leaves"),
    ],
)
def test_wrong_pipelines_fail(make, says):
    with pytest.raises(VerificationError, match=says):
        one_block(images.live(make, False, _SIZE))


def test_pipeline_that_does_not_shuffle_fails():
    def make(records, device, seed):
        def epoch(number):
            for start in range(0, len(records.labels) - BATCH + 1, BATCH):
                rows = slice(start, start + BATCH)
                images = records.images[rows].astype(np.float32) / 255.0
                yield jax.device_put({"image": images, "label": records.labels[rows]}, device)

        return epoch

    with pytest.raises(VerificationError, match="not shuffled"):
        one_block(images.live(make, False, _SIZE))


def test_pipeline_that_loses_batches_later_fails():
    def make(records, device, seed):
        whole = numpy_loop(records, device, seed)
        return lambda number: iter(list(whole(number))[: 5 if number == 0 else 4])

    with pytest.raises(VerificationError, match="epoch 1 has 4 batches, not 5"):
        one_block(images.live(make, False, _SIZE))


def test_records_spell_their_indices():
    records = images.make_records(70_000)
    spelled = np.ascontiguousarray(records.images[:, 0, :4, 0]).view("<u4")[:, 0]
    assert np.array_equal(spelled, np.arange(70_000))
