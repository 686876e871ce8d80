"""Measure what the statistics of a feed cost: the processor time for a step with them, less that without them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

import penstock as ps
from penstock.feed.starvation import Meter
from penstock_bench.garbage_collector import freeze_gc
from penstock_bench.model import Measurement, Metric, Target, Variant, Workload

T = TypeVar("T")

_TRIMMED = 0.02  # share of the pairs at each end that do not count; the looks at the devices are in more of them
_WARM_UP = 100  # steps
_STEP = 1e-3  # seconds
_INPUT = {"batches are ready": 0.0, "each batch is awaited": 1.5e-3}  # seconds that the source takes for a batch


@dataclass(frozen=True)
class Size:
    """The size of the measurement.

    Attributes:
      arrays: number of arrays of the model, which a look at the devices goes through.
      steps: number of steps in a block. Many short blocks scatter less than few long ones.
      pairs: number of pairs of blocks, one with the statistics and one without them, in a random order.
    """

    arrays: int
    steps: int
    pairs: int


class _Switch(Meter):
    """A `Meter` that can be switched off.

    Attributes:
      on: whether it measures.
    """

    on = True
    _called_at = 0.0

    def take(self, get: Callable[[float | None], T], timeout: float | None) -> T:
        before, self._called_at = self._called_at, time.perf_counter()
        if self.on:
            return super().take(get, timeout)
        self._next_look += self._called_at - before  # the next look comes no sooner for the time in which it was off
        return get(timeout)

    def hand_over(self, batch: Any, placing: float) -> None:
        if self.on:
            super().hand_over(batch, placing)


def _source(seconds: float) -> Iterator[dict[str, np.ndarray]]:
    while True:
        if seconds:
            time.sleep(seconds)
        yield {"x": np.zeros(16, np.float32)}


def _differences(size: Size, seconds: float) -> list[float]:
    """Return, for each pair of blocks, the microseconds of processor time that the statistics take for a step.

    The step itself sleeps. All blocks are of one feed, so that its threads and buffers are the same.
    """
    differences, order = [], random.Random(0)
    with ps.feed(_source(seconds)) as feed:
        feed._meter = meter = _Switch()
        for _ in range(_WARM_UP):
            next(feed)
        for _ in range(size.pairs):
            took = {}
            for meter.on in order.sample([True, False], 2):
                begin = time.process_time()
                for _ in range(size.steps):
                    next(feed)
                    time.sleep(_STEP)
                took[meter.on] = (time.process_time() - begin) / size.steps * 1e6
            differences.append(took[True] - took[False])
    return differences


def measure(size: Size) -> Measurement:
    model = jax.block_until_ready([jnp.zeros(8) + number for number in range(size.arrays)])
    freeze_gc()
    differences = {name: _differences(size, seconds) for name, seconds in _INPUT.items()}
    values = {name: float(scipy.stats.trim_mean(each, _TRIMMED)) for name, each in differences.items()}
    return Measurement(values, {"arrays": len(model), "µs of each pair of blocks": differences})


WORKLOAD = Workload(
    name="verdict cost",
    title="processor time for a step of 1 ms that the verdict takes, with {arrays:,} arrays on the device",
    metrics=tuple(Metric(name, "µs", "lower") for name in _INPUT),
    baseline=None,
    variants=(
        Variant(
            "penstock",
            measure,
            note="with the statistics less without them: the 2 % trimmed mean of {pairs} pairs of blocks of {steps} steps",
        ),
    ),
    sizes={"full": Size(arrays=200, steps=20, pairs=200), "quick": Size(arrays=200, steps=20, pairs=4)},
    targets=tuple(Target("penstock", name, 10) for name in _INPUT),
)
