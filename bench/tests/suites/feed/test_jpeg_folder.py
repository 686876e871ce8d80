"""The verification of the JPEG workload: correct pipelines pass, and each way to break one fails."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.tests.suites.feed.one_block import one_block

import penstock as ps
from penstock_bench.model import VerificationError
from penstock_bench.suites.feed import jpeg_folder
from penstock_bench.suites.feed.jpeg_files import read_numbers, resized_by_pillow, write_folder
from penstock_bench.suites.feed.jpeg_folder import Size
from penstock_bench.suites.feed.jpeg_pipelines import BATCH, SIZE, penstock, tf_data

_SIZE = Size(files=2 * BATCH + 3)


def _broken(change):
    def make(folder, device, seed):
        return lambda number: iter(change(list(penstock(folder, device, seed)(number))))

    return make


def _leaf(name, fn):
    return _broken(lambda batches: [{**batches[0], name: fn(batches[0][name])}, *batches[1:]])


def test_photos_have_the_size_of_photos_and_spell_their_number(tmp_path):
    write_folder(tmp_path, 30, seed=1)
    files = sorted(tmp_path.glob("*/*.jpg"))
    assert len(files) == 30
    assert 40_000 < np.mean([file.stat().st_size for file in files]) < 60_000
    for size in (64, SIZE):
        assert read_numbers(resized_by_pillow(tmp_path, 30, size)).tolist() == list(range(30))


@pytest.mark.parametrize("make", [penstock, tf_data])
def test_correct_pipelines_pass(make):
    measured = one_block(jpeg_folder.live(make, _SIZE))
    assert measured.values["throughput"] > 0
    assert measured.details["timed_rows"] == 2 * BATCH


def _without_antialiasing(folder, device, seed):
    def transform(record):
        image = ps.decode_image(record["image"], 375, decoder="pil")
        return {**record, "image": image[np.arange(SIZE) * 375 // SIZE][:, np.arange(SIZE) * 375 // SIZE]}

    loader = ps.Loader(ps.images(folder, None), BATCH, shuffle=True, epochs=1, transform=ps.per_record(transform))
    return lambda number: (jax.device_put(batch, device) for batch in loader)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_broken(lambda batches: batches[:1]), "has 1 batches, not 2"),
        (_broken(lambda batches: [batches[0], batches[0]]), "comes 2 times"),
        (_leaf("label", lambda x: (x + 1) % 10), "label is not its file's"),
        (_leaf("image", lambda x: x.astype(jnp.float32)), "image is float32"),
        (_leaf("image", lambda x: x.at[3].set(x[3] // 2 + 64)), "differs from Pillow's by"),
        (_leaf("image", lambda x: x.at[5].set(jnp.roll(x[5], 2, axis=0))), "differs from Pillow's by"),
        (_leaf("image", lambda x: x[:, ::-1]), "differs from Pillow's by"),
        (_without_antialiasing, "differs from Pillow's by"),
    ],
)
def test_wrong_pipelines_fail(make, says):
    with pytest.raises(VerificationError, match=says):
        one_block(jpeg_folder.live(make, _SIZE))
