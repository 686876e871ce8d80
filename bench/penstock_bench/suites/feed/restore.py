"""Measure how long a resumed run waits for its first batch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import jax
import numpy as np

import penstock as ps
from penstock_bench.model import Measurement, Metric, Target, Variant, VerificationError, Workload
from penstock_bench.suites.feed import images
from penstock_bench.suites.feed.batch import block_until_ready
from penstock_bench.suites.feed.image_pipelines import BATCH, Records, scale_on_device

_STEPS = {"step 0": 0, "step 10^9": 10**9}


@dataclass(frozen=True)
class Size:
    records: int
    repeats: int


def _loader(records: Records) -> ps.Loader:
    return ps.Loader({"image": records.images, "label": records.labels}, BATCH, shuffle=True, seed=42)


def _milliseconds(records: Records, step: int, device: jax.Device) -> float:
    """Return the time from `restore` to the first batch, with a new loader and a new feed. Check the batch."""
    loader = _loader(records)
    with ps.feed(loader, to=device, host_buffer=4, device_buffer=2, transform=scale_on_device) as batches:
        state = {**batches.state(), "step": step}
        begin = time.perf_counter()
        batches.restore(state)
        batch = block_until_ready(next(batches))
        seconds = time.perf_counter() - begin
        ids = images.read_ids(batch, records, device)
    expected = _loader(records)[step]["image"]
    if not np.array_equal(records.images[ids], expected):
        raise VerificationError(f"the first batch is not the one of step {step}")
    return seconds * 1e3


def measure(size: Size) -> Measurement:
    device, records = jax.devices()[0], images.make_records(size.records)
    _milliseconds(records, 1, device)  # compiles the transform
    times: dict[str, list[float]] = {name: [] for name in _STEPS}
    for _ in range(size.repeats):
        for name, step in _STEPS.items():
            times[name].append(_milliseconds(records, step, device))
    return Measurement({name: median(values) for name, values in times.items()}, {"ms": times})


WORKLOAD = Workload(
    name="restore",
    title="milliseconds from feed.restore(state) to the first batch on the device, {records:,} shuffled images",
    metrics=tuple(Metric(name, "ms", "lower") for name in _STEPS),
    baseline=None,
    variants=(Variant("penstock", measure, note="after compilation"),),
    sizes={"full": Size(records=60_000, repeats=15), "quick": Size(records=3_900, repeats=3)},
    targets=(Target("penstock", "step 10^9", 10),),
)
