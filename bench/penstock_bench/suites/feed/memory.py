"""Measure how much memory grows while batches go through a feed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

import penstock as ps
from penstock_bench.model import Measurement, Metric, Target, Variant, VerificationError, Workload
from penstock_bench.suites.feed.batch import Batch, block_until_ready
from penstock_bench.suites.feed.check import check_leaf

_FLOATS = 250_000  # 1 MB


@dataclass(frozen=True)
class Size:
    warm_up: int
    batches: int


def _fresh(count: int) -> Iterator[Batch]:
    for number in range(count):
        yield {"x": np.full(_FLOATS, number, np.float32)}


def _direct(count: int, device: jax.Device) -> Iterator[Batch]:
    for batch in _fresh(count):
        yield jax.device_put(batch, device)


def _penstock(count: int, device: jax.Device) -> Iterator[Batch]:
    with ps.feed(_fresh(count), to=device, host_buffer=4, device_buffer=2) as batches:
        yield from batches


def measure(make: Callable[[int, jax.Device], Iterator[Batch]], size: Size) -> Measurement:
    """Measure by how much the peak of resident memory exceeds its level at the end of the warm-up.

    The memory is read after every batch.
    """
    import psutil

    device, resident = jax.devices()[0], psutil.Process().memory_info
    for number, batch in enumerate(make(20, device)):
        if (check_leaf("x", batch["x"], (_FLOATS,), np.float32, device) != number).any():
            raise VerificationError(f"batch {number} holds other values")
    base = most = had = 0
    for batch in make(size.warm_up + size.batches, device):
        block_until_ready(batch)
        had += 1
        if had == size.warm_up:
            base = most = resident().rss
        elif had > size.warm_up:
            most = max(most, resident().rss)
    if had != size.warm_up + size.batches:
        raise VerificationError(f"{had} batches, not {size.warm_up + size.batches}")
    return Measurement({"growth": (most - base) / 1e6}, {"resident_after_warm_up_mb": base / 1e6})


WORKLOAD = Workload(
    name="memory",
    title="growth of resident memory over {batches:,} fresh batches of 1 MB, after {warm_up:,} of warm-up",
    metrics=(Metric("growth", "MB", "lower"),),
    baseline=None,
    variants=(
        Variant("device_put", partial(measure, _direct), ("psutil",), "in the loop, for comparison"),
        Variant("penstock", partial(measure, _penstock), ("psutil",), "buffers of 4 and 2 batches"),
    ),
    sizes={"full": Size(warm_up=500, batches=10_000), "quick": Size(warm_up=50, batches=100)},
    targets=(Target("penstock", "growth", 32),),
)
