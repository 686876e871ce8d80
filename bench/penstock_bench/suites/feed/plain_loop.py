"""Compare a feed with a plain loop on one thread: where the consumer does nothing else, and where it waits for a step each time.

Both take turns in one process, in short blocks. So each ratio is one of neighbouring blocks, and the load of the machine falls on
both.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

import penstock as ps
from penstock_bench.garbage_collector import freeze_gc
from penstock_bench.model import Measurement, Metric, Target, Variant, VerificationError, Workload
from penstock_bench.suites.feed.batch import Batch, block_until_ready
from penstock_bench.suites.feed.check import check_leaf

_SHAPES = {"64 B": (8, 8), "784 B": (28, 28), "3 KB": (32, 32, 3), "12 KB": (64, 64, 3)}
_BATCHES = (96, 128, 256, 1024)
_CASTS = ("host", "device")
_STEPS = (1, 5)  # milliseconds of a step, which leaves the processor free
_BATCH_WITH_STEP = 256

_Use = Callable[[Batch], object]  # returns when the batch has been used


@dataclass(frozen=True)
class Size:
    records: int  # at most
    megabytes: int  # of records, at most
    warm_up: tuple[int, float]  # of each iterator, in which a feed chooses its threads: batches, and seconds at most, about
    blocks: int
    seconds: float  # of a block, about
    settle: int  # batches before each block; in full size more than a feed holds, so that no timed batch was made before


def _cast_on_host(batch: Batch) -> Batch:
    return {"image": batch["image"].astype(np.float32) / 255, "label": batch["label"]}


@jax.jit
def _cast_on_device(batch: Batch) -> Batch:
    return {"image": batch["image"].astype(jnp.float32) / 255, "label": batch["label"]}


def _loop(data: Batch, batch_size: int, cast: str, device: jax.Device) -> Iterator[Batch]:
    """Yield batches for ever, with two in flight: take, cast and transfer one, then yield the one before it."""
    rng, records, before = np.random.default_rng(0), len(data["label"]), None
    while True:
        order = rng.permutation(records)
        for begin in range(0, records - batch_size + 1, batch_size):
            rows = order[begin : begin + batch_size]
            host = {name: array[rows] for name, array in data.items()}
            if cast == "host":
                host = _cast_on_host(host)
            placed = jax.device_put(host, device)
            if cast == "device":
                placed = _cast_on_device(placed)
            if before is not None:
                yield before
            before = placed


def _feed(data: Batch, batch_size: int, cast: str, device: jax.Device) -> ps.Feed:
    on_host, on_device = (_cast_on_host, None) if cast == "host" else (None, _cast_on_device)
    return ps.feed(ps.Loader(data, batch_size, shuffle=True, transform=on_host), to=device, transform=on_device)


def _data(shape: tuple[int, ...], size: Size) -> Batch:
    records = min(size.records, (size.megabytes << 20) // int(np.prod(shape)))
    images = np.random.default_rng(1).integers(0, 256, (records, *shape), np.uint8)
    return {"image": images, "label": np.arange(records, dtype=np.int32)}


def measure(shape: tuple[int, ...], size: Size) -> Measurement:
    data, device = _data(shape, size), jax.devices()[0]
    values, details = {}, {}
    for cast in _CASTS:
        for batch_size in _BATCHES:
            with _feed(data, batch_size, cast, device) as feed:
                pair = (_loop(data, batch_size, cast, device), feed)
                for batches in pair:
                    _check(data, next(batches), batch_size, device)
                name = _metric(cast, batch_size)
                uses: dict[str, _Use] = {name: block_until_ready}
                if batch_size == _BATCH_WITH_STEP:
                    uses |= {_metric(cast, batch_size, step): _step(step) for step in _STEPS}
                for metric, use in uses.items():
                    loop, fed = _take_turns(pair, use, size)
                    values[metric] = median(one / other for one, other in zip(loop, fed, strict=True))
                    details[f"{metric}: µs of the loop and of the feed"] = [round(median(x) * 1e6, 1) for x in (loop, fed)]
    return Measurement(values, details)


def _step(milliseconds: int) -> _Use:
    """Return a function that waits for a batch and then sleeps, like a loop that waits for a step of an accelerator."""

    def use(batch: Batch) -> None:
        block_until_ready(batch)
        time.sleep(milliseconds / 1e3)

    return use


def _take_turns(pair: tuple[Iterator[Batch], Iterator[Batch]], use: _Use, size: Size) -> tuple[list[float], list[float]]:
    """Return the seconds a batch of each iterator in each block."""
    most, seconds = size.warm_up
    for batches in pair:
        _seconds(batches, use, min(most, max(size.settle, round(seconds / _seconds(batches, use, size.settle)))))
    count = max(size.settle, round(size.seconds / _seconds(pair[0], use, size.settle)))
    freeze_gc()
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(size.blocks):
        for side in random.sample((0, 1), 2):
            _seconds(pair[side], use, size.settle)
            taken[side].append(_seconds(pair[side], use, count))
    return taken


def _seconds(batches: Iterator[Batch], use: _Use, count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        use(next(batches))
    return (time.perf_counter() - begin) / count


def _check(data: Batch, batch: Batch, batch_size: int, device: jax.Device) -> None:
    rows = check_leaf("label", batch["label"], (batch_size,), np.int32, device)
    images = check_leaf("image", batch["image"], (batch_size, *data["image"].shape[1:]), np.float32, device)
    if len(set(rows.tolist())) != batch_size:
        raise VerificationError("a record comes twice in one batch")
    if not np.allclose(images, data["image"][rows] / np.float32(255), rtol=0, atol=1e-6):
        raise VerificationError("an image's values are not its record's divided by 255")


def _metric(cast: str, batch_size: int, step: int = 0) -> str:
    return f"{cast}, {batch_size:,}" + (f", step of {step} ms" if step else "")


_METRICS = (
    *(_metric(cast, batch_size) for cast in _CASTS for batch_size in _BATCHES),
    *(_metric(cast, _BATCH_WITH_STEP, step) for cast in _CASTS for step in _STEPS),
)


def _variant(name: str) -> Variant:
    run: Callable[[Size], Measurement] = partial(measure, _SHAPES[name])
    return Variant(name, run, note="bytes of a record")


WORKLOAD = Workload(
    name="loop",
    title="batches per second of a feed, divided by those of a plain loop, by the place of the cast, the batch size and the step",
    metrics=tuple(Metric(name, "×", "higher") for name in _METRICS),
    baseline=None,
    variants=tuple(_variant(name) for name in _SHAPES),
    sizes={
        "full": Size(records=32_768, megabytes=96, warm_up=(400, 1.0), blocks=15, seconds=0.02, settle=8),
        "quick": Size(records=2048, megabytes=24, warm_up=(2, 0.1), blocks=1, seconds=1e-3, settle=1),
    },
    targets=tuple(Target(record, metric, 1.0) for record in _SHAPES for metric in _METRICS),
    time_limit=300.0,
)
