"""Measure shuffled 28x28 images as float32 batches on the device: the pipeline of Grain's guide to training with JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from penstock_bench.garbage_collector import freeze_gc
from penstock_bench.model import Live, Measurement, Metric, Target, Variant, VerificationError, Workload
from penstock_bench.suites.feed import image_pipelines as pipelines
from penstock_bench.suites.feed.batch import Batch
from penstock_bench.suites.feed.check import check_epoch, check_leaf
from penstock_bench.suites.feed.grain_notes import GRAIN_DEFAULT, GRAIN_IN_MEMORY
from penstock_bench.suites.feed.image_pipelines import BATCH, Records
from penstock_bench.suites.feed.throughput import Epoch, RowsPerSecond

_SEED = 42


@dataclass(frozen=True)
class Size:
    """The number of images.

    Attributes:
      records: records in an epoch.
      slow_records: records in an epoch of the slow variants. The time of a record does not depend on the length of the epoch.
    """

    records: int
    slow_records: int


def make_records(records: int) -> Records:
    """Return random images whose first four pixels encode the record's index, so that delivered records can be identified."""
    images = np.random.default_rng(_SEED).integers(0, 256, (records, 28, 28, 1), np.uint8)
    indices = np.arange(records, dtype="<u4")
    images[:, 0, :4, 0] = indices.view(np.uint8).reshape(records, 4)
    return Records(images, (indices % 10).astype(np.int32))


def read_ids(batch: Batch, records: Records, device: jax.Device) -> np.ndarray:
    """Return the record indices that a batch's pixels encode, after a check that it holds exactly those records."""
    if set(batch) != {"image", "label"}:
        raise VerificationError(f"a batch has the leaves {sorted(batch)}")
    images = check_leaf("image", batch["image"], (BATCH, 28, 28, 1), np.float32, device)
    labels = check_leaf("label", batch["label"], (BATCH,), np.int32, device)
    if images.min() < 0 or images.max() > 1:
        raise VerificationError(f"values from {images.min()} to {images.max()}, not in [0, 1]")
    spelled = np.rint(images[:, 0, :4, 0] * 255).astype(np.uint8)
    ids = np.ascontiguousarray(spelled).view("<u4")[:, 0].astype(np.int64)
    if ids.max() >= len(records.labels):
        raise VerificationError(f"pixels spell record {ids.max()} of {len(records.labels)}")
    # Compilers replace a division by a product with the reciprocal, which may differ in the last bit.
    if not np.allclose(images, records.images[ids] / np.float32(255), rtol=0, atol=1e-6):
        raise VerificationError("an image's values are not its record's divided by 255")
    if not np.array_equal(labels, records.labels[ids]):
        raise VerificationError("a label is not its record's")
    return ids


@contextlib.contextmanager
def live(make: Callable[[Records, jax.Device, int], Epoch], slow: bool, size: Size) -> Iterator[Live]:
    """Measure the throughput of one pipeline: `make` gets the records, the device and the seed."""
    count = size.slow_records if slow else size.records
    records, device = make_records(count), jax.devices()[0]

    def check(batches: Iterator[Batch]) -> None:
        check_epoch(batches, lambda batch: read_ids(batch, records, device), count, BATCH)

    block = RowsPerSecond(make(records, device, _SEED), check, count // BATCH, BATCH)
    freeze_gc()
    yield Live({"throughput": block}, lambda: Measurement(details=block.details))


def _variant(
    name: str,
    make: Callable[[Records, jax.Device, int], Epoch],
    requires: tuple[str, ...] = (),
    note: str = "",
    slow: bool = False,
) -> Variant:
    notes = [note] if note else []
    if slow:
        notes.append("epochs of {slow_records:,} records")
    return Variant(name, requires=requires, note="; ".join(notes), live=partial(live, make, slow))


_GRAIN_C = "grain.experimental.device_put, buffers 4 and 2"

WORKLOAD = Workload(
    name="images",
    title="{records:,} images 28x28 uint8, shuffled, float32/255, batches of 128 on the device",
    metrics=(Metric("throughput", "records/s", "higher"),),
    baseline="grain C",
    variants=(
        _variant("grain A", pipelines.grain_a, ("grain",), f"jax.device_put in the loop; {GRAIN_DEFAULT}", slow=True),
        _variant("grain B", pipelines.grain_b, ("grain",), f"ThreadPrefetch 4, then device_put; {GRAIN_DEFAULT}", slow=True),
        _variant("grain C", pipelines.grain_c, ("grain",), f"{_GRAIN_C}; {GRAIN_DEFAULT}", slow=True),
        _variant(
            "grain C, 0 threads",
            partial(pipelines.grain_c, threads=0),
            ("grain",),
            f"{_GRAIN_C}; {GRAIN_IN_MEMORY}",
            slow=True,
        ),
        _variant("torch, 0 workers", partial(pipelines.torch, workers=0), ("torch",), "DataLoader"),
        _variant(
            "torch, 2 workers",
            partial(pipelines.torch, workers=2),
            ("torch",),
            "spawned, as forks of a process that runs JAX may hang; persistent, so their start is not timed",
        ),
        _variant("tf.data", pipelines.tf_data, ("tensorflow",), "shuffle buffer of all records, AUTOTUNE"),
        _variant("NumPy loop", pipelines.numpy_loop, note="images[indices] / 255, device_put"),
        _variant("penstock", pipelines.penstock, note="uint8 to the device, cast there"),
        _variant("penstock, host cast", pipelines.penstock_host, note="cast in the Loader's transform"),
    ),
    sizes={
        "full": Size(records=60_000, slow_records=12_900),
        "quick": Size(records=3_900, slow_records=1_300),
    },
    targets=(Target("penstock", "throughput", 50, "grain C"), Target("penstock", "throughput", 1.2, "NumPy loop")),
    time_limit=180,
    verifies="each record once, with the right bytes, on the right device",
)
