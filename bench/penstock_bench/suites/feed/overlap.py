"""Measure the overlap of a producer and a step that take known times: with it, a feed runs at the pace of the step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

import penstock as ps
from penstock_bench.garbage_collector import freeze_gc
from penstock_bench.model import Live, Measurement, Metric, Target, Variant, VerificationError, Workload
from penstock_bench.suites.feed.batch import Batch, block_until_ready
from penstock_bench.suites.feed.check import check_leaf
from penstock_bench.suites.feed.grain_notes import GRAIN_DEFAULT

# (producer, step), in milliseconds
_PACES = {"4 ms, 5 ms": (4.0, 5.0), "1 ms, 1 ms": (1.0, 1.0)}

# Seconds before the deadline. From `_LOOK` on, the clock is polled instead of sleeping: on a virtual machine, a sleep ends about
# 0.1 ms late, and often 0.5 ms. Between two polls the interpreter lock is released, as it is while a device computes. From
# `_SPIN` on it is kept, because releasing it takes about 0.05 ms.
_LOOK, _SPIN = 2e-3, 0.1e-3


@dataclass(frozen=True)
class Size:
    """The steps of a block: those at its start that are not timed, and the fewest that are."""

    warm_up: int
    steps: int


def step_until(deadline: float) -> None:
    """Wait until `time.perf_counter` reaches `deadline`, to within a few microseconds."""
    while (left := deadline - time.perf_counter()) > 0:
        if left > _SPIN:
            time.sleep(max(0.0, left - _LOOK))


def _host_batch(number: int, seconds: float) -> Batch:
    time.sleep(seconds)
    return {"x": np.full(16, number, np.float32)}


def _plain(count: int, seconds: float, device: jax.Device) -> Iterator[Batch]:
    for number in range(count):
        yield jax.device_put(_host_batch(number, seconds), device)


def _grain(count: int, seconds: float, device: jax.Device) -> Iterator[Batch]:
    import grain

    ds: Any = grain.MapDataset.range(count).map(lambda number: _host_batch(number, seconds)).to_iter_dataset()
    return iter(grain.experimental.device_put(ds=ds, device=device, cpu_buffer_size=4, device_buffer_size=2))


def _penstock(count: int, seconds: float, device: jax.Device) -> Iterator[Batch]:
    produced = (_host_batch(number, seconds) for number in range(count))
    with ps.feed(produced, to=device, host_buffer=4, device_buffer=2) as batches:
        yield from batches


@contextlib.contextmanager
def live(make: Callable[[int, float, jax.Device], Iterator[Batch]], size: Size) -> Iterator[Live]:
    device = jax.devices()[0]
    details: dict[str, float] = {}

    def block(name: str, seconds: float) -> float:
        produce, step = (milliseconds / 1e3 for milliseconds in _PACES[name])
        steps = max(size.steps, round(seconds / step))
        batches = make(size.warm_up + steps, produce, device)
        took, details[f"step alone in ms, {name}"] = _milliseconds(batches, step, size.warm_up, steps, device)
        return took

    freeze_gc()
    for name in _PACES:
        block(name, 0.0)
    yield Live({name: partial(block, name) for name in _PACES}, lambda: Measurement(details=details))


def _milliseconds(batches: Iterator[Batch], step: float, warm_up: int, steps: int, device: jax.Device) -> tuple[float, float]:
    """Return the mean milliseconds between the ends of steps, and of a step itself. Check that no batch is lost."""
    in_steps, ends, had = 0.0, [], []
    for number, batch in enumerate(batches):
        handed_over = time.perf_counter()
        block_until_ready(batch)
        had.append(batch)
        step_until(handed_over + step)
        end = time.perf_counter()
        if number >= warm_up - 1:
            ends.append(end)
        if number >= warm_up:
            in_steps += end - handed_over
    numbers = [check_leaf("x", batch["x"], (16,), np.float32, device)[0] for batch in had]
    if numbers != list(range(warm_up + steps)):
        raise VerificationError(f"{len(numbers)} batches, in the order {numbers[:8]} …")
    return (ends[-1] - ends[0]) / steps * 1e3, in_steps / steps * 1e3


WORKLOAD = Workload(
    name="overlap",
    title="milliseconds a step, with a producer that sleeps and a step that takes exactly so long",
    metrics=tuple(Metric(name, "ms", "lower", ideal=step) for name, (_, step) in _PACES.items()),
    baseline="none",
    variants=(
        Variant("none", live=partial(live, _plain), note="one after the other"),
        Variant("grain C", requires=("grain",), live=partial(live, _grain), note=f"{GRAIN_DEFAULT}, which produce"),
        Variant("penstock", live=partial(live, _penstock), note="one thread produces"),
    ),
    sizes={"full": Size(warm_up=20, steps=50), "quick": Size(warm_up=5, steps=20)},
    targets=(Target("penstock", "4 ms, 5 ms", 5.05),),
    verifies="each batch once, in order",
)
