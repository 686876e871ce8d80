"""Measure the overhead of a feed with tiny batches that are ready, and only have to be handed over."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import jax
import numpy as np

import penstock as ps
from penstock_bench.garbage_collector import freeze_gc
from penstock_bench.model import Live, Metric, Target, Variant, VerificationError, Workload
from penstock_bench.suites.feed.batch import Batch, block_until_ready
from penstock_bench.suites.feed.check import check_leaf
from penstock_bench.suites.feed.grain_notes import GRAIN_DEFAULT, GRAIN_IN_MEMORY


@dataclass(frozen=True)
class Size:
    """The batches of a pass: those at its start that are not timed, and those that are."""

    warm_up: int
    batches: int


def _direct(batches: Sequence[Batch], device: jax.Device) -> Iterator[Batch]:
    for batch in batches:
        yield jax.device_put(batch, device)


def _one_thread(batches: Sequence[Batch], device: jax.Device) -> Iterator[Batch]:
    placed: queue.Queue[Batch] = queue.Queue(2)

    def place() -> None:
        for batch in batches:
            placed.put(jax.device_put(batch, device))

    thread = threading.Thread(target=place, daemon=True)
    thread.start()
    for _ in range(len(batches)):
        yield placed.get()
    thread.join()


def _grain(batches: Sequence[Batch], device: jax.Device, threads: int | None = None) -> Iterator[Batch]:
    import grain

    read_options = None if threads is None else grain.ReadOptions(num_threads=threads)
    ds = grain.MapDataset.source(batches).to_iter_dataset(read_options)
    return iter(grain.experimental.device_put(ds=ds, device=device, cpu_buffer_size=4, device_buffer_size=2))


def _penstock_list(batches: Sequence[Batch], device: jax.Device) -> Iterator[Batch]:
    with ps.feed(batches, to=device, host_buffer=4, device_buffer=2) as placed:
        yield from placed


def _penstock_generator(batches: Sequence[Batch], device: jax.Device) -> Iterator[Batch]:
    with ps.feed((batch for batch in batches), to=device, host_buffer=4, device_buffer=2) as placed:
        yield from placed


@contextlib.contextmanager
def live(make: Callable[[Sequence[Batch], jax.Device], Iterator[Batch]], size: Size) -> Iterator[Live]:
    device = jax.devices()[0]
    host = [{"x": np.full(16, number, np.float32)} for number in range(size.warm_up + size.batches)]
    _check(make(host[: size.warm_up], device), size.warm_up, device)

    def block(seconds: float) -> float:
        spent, timed, passes = 0.0, 0, 0
        while spent < seconds or not passes:
            passes += 1
            batches = make(host, device)
            for batch in islice(batches, size.warm_up):
                block_until_ready(batch)
            begin = time.perf_counter()
            for batch in batches:
                block_until_ready(batch)
                timed += 1
            spent += time.perf_counter() - begin
        if timed != passes * size.batches:
            raise VerificationError(f"{timed} batches were timed, not {passes * size.batches}")
        return spent / timed * 1e6

    freeze_gc()
    yield Live({"overhead": block})


def _check(batches: Iterator[Batch], count: int, device: jax.Device) -> None:
    numbers = [check_leaf("x", batch["x"], (16,), np.float32, device)[0] for batch in batches]
    if numbers != list(range(count)):
        raise VerificationError(f"{len(numbers)} batches of {count}, in the order {numbers[:8]} …")


WORKLOAD = Workload(
    name="overhead",
    title="ready batches of 64 bytes, time for each",
    metrics=(Metric("overhead", "µs", "lower"),),
    baseline="grain C",
    variants=(
        Variant("grain C", requires=("grain",), live=partial(live, _grain), note=GRAIN_DEFAULT),
        Variant("grain C, 0 threads", requires=("grain",), live=partial(live, partial(_grain, threads=0)), note=GRAIN_IN_MEMORY),
        Variant("thread and queue", live=partial(live, _one_thread), note="queue.Queue(2), device_put on the thread"),
        Variant("device_put", live=partial(live, _direct), note="in the loop, with nothing made ahead"),
        Variant("penstock, list", live=partial(live, _penstock_list)),
        Variant("penstock, generator", live=partial(live, _penstock_generator), note="whose batches it copies"),
    ),
    sizes={"full": Size(warm_up=500, batches=2_000), "quick": Size(warm_up=100, batches=500)},
    targets=(
        Target("penstock, list", "overhead", 0.35, "grain C"),
        Target("penstock, generator", "overhead", 0.35, "grain C"),
    ),
    verifies="each batch once, in order",
)
