"""Measure JPEG files of 500x375 pixels as batches of 224x224 on the device, beside a torch `DataLoader` and `tf.data`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np

from penstock_bench.garbage_collector import freeze_gc
from penstock_bench.model import Live, Measurement, Metric, Target, Variant, VerificationError, Workload
from penstock_bench.suites.feed import jpeg_pipelines as pipelines
from penstock_bench.suites.feed.batch import Batch
from penstock_bench.suites.feed.check import check_epoch, check_leaf
from penstock_bench.suites.feed.jpeg_files import CLASSES, read_numbers, resized_by_pillow, write_folder
from penstock_bench.suites.feed.jpeg_pipelines import BATCH, SIZE
from penstock_bench.suites.feed.throughput import Epoch, RowsPerSecond

_SEED = 42
_LARGEST_DIFFERENCE = 2.5  # mean over an image, in grey levels; a shift by half a pixel gives about 1.5


@dataclass(frozen=True)
class Size:
    """The number of files in an epoch."""

    files: int


def read_ids(batch: Batch, expected: np.ndarray, device: jax.Device) -> np.ndarray:
    """Return the numbers of a batch's photos, after a check of labels, and of pixels against Pillow's."""
    if set(batch) != {"image", "label"}:
        raise VerificationError(f"a batch has the leaves {sorted(batch)}")
    images = check_leaf("image", batch["image"], (BATCH, SIZE, SIZE, 3), np.uint8, device)
    labels = check_leaf("label", batch["label"], (BATCH,), np.int32, device)
    ids = read_numbers(images)
    if ids.max() >= len(expected):
        raise VerificationError(f"pixels spell file {ids.max()} of {len(expected)}")
    difference = np.abs(images.astype(np.int16) - expected[ids]).mean(axis=(1, 2, 3)).max()
    if difference > _LARGEST_DIFFERENCE:
        raise VerificationError(f"an image differs from Pillow's by {difference:.2f} grey levels on average")
    if not np.array_equal(labels, ids % CLASSES):
        raise VerificationError("a label is not its file's")
    return ids


@contextlib.contextmanager
def live(make: Callable[[Path, jax.Device, int], Epoch], size: Size) -> Iterator[Live]:
    """Measure the throughput of one pipeline: `make` gets the folder, the device and the seed."""
    device = jax.devices()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder, size.files, _SEED)
        expected = resized_by_pillow(folder, size.files, SIZE)
        kilobytes = sum(file.stat().st_size for file in folder.glob("*/*.jpg")) / size.files / 1e3

        def check(batches: Iterator[Batch]) -> None:
            check_epoch(batches, lambda batch: read_ids(batch, expected, device), size.files, BATCH)

        block = RowsPerSecond(make(folder, device, _SEED), check, size.files // BATCH, BATCH)
        freeze_gc()
        yield Live({"throughput": block}, lambda: Measurement(details={**block.details, "kilobytes_a_file": kilobytes}))


WORKLOAD = Workload(
    name="jpeg-folder",
    title="{files:,} JPEG files of 500x375 pixels, shuffled, resized to 224x224, uint8 batches of 64 on the device",
    metrics=(Metric("throughput", "images/s", "higher"),),
    baseline="torch, 2 workers",
    variants=(
        Variant(
            "torch, 2 workers",
            requires=("torch", "PIL"),
            live=partial(live, pipelines.torch),
            note="DataLoader, Pillow; workers are spawned and persistent, so their start is not timed",
        ),
        Variant(
            "tf.data",
            requires=("tensorflow", "PIL"),
            live=partial(live, pipelines.tf_data),
            note="decode_jpeg, antialias=True, AUTOTUNE",
        ),
        Variant("penstock", requires=("PIL", "simplejpeg", "cv2"), live=partial(live, pipelines.penstock), note="workers=2"),
        Variant(
            "penstock, Pillow",
            requires=("PIL",),
            live=partial(live, partial(pipelines.penstock, decoder="pil")),
            note="workers=2",
        ),
    ),
    sizes={"full": Size(files=640), "quick": Size(files=BATCH + 1)},
    targets=(Target("penstock", "throughput", 1.5, "torch, 2 workers"),),
    time_limit=180,
    verifies="each record once, with the right bytes, on the right device",
)
