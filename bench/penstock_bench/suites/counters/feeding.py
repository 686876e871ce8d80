"""Count what a feed and a training loop cost in Python for each batch: bytecodes and memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import penstock as ps
from penstock_bench.model import Measurement, Metric, Target, Variant, Workload
from penstock_bench.suites.counters.bytecodes import count_bytecodes

_FEW = 20  # batches


@dataclass(frozen=True)
class Size:
    batches: int  # beyond a few, whose costs are subtracted: these include the start


def _host(batches: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full(16, number, np.float32)} for number in range(batches)]


def _plain(batches: int) -> None:
    for batch in _host(batches):
        jax.block_until_ready(jax.device_put(batch))


def _list(batches: int) -> None:
    with ps.feed(_host(batches)) as feed:
        _drain(feed)


def _generator(batches: int) -> None:
    with ps.feed(batch for batch in _host(batches)) as feed:
        _drain(feed)


def _loader(batches: int) -> None:
    with ps.feed(ps.Loader({"x": np.zeros((batches * 8, 16), np.float32)}, 8, shuffle=True, epochs=1)) as feed:
        _drain(feed)


@jax.jit
def _step(state: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    state = state + batch["x"].sum()
    return state, {"loss": state}


def _fit(batches: int) -> None:
    with ps.feed(ps.Loader({"x": np.zeros((batches * 8, 16), np.float32)}, 8, shuffle=True, epochs=None)) as feed:
        ps.fit(_step, jnp.zeros(()), feed, steps=batches, log=[], log_every=batches)


def _drain(feed: Iterator[Any]) -> None:
    for batch in feed:
        jax.block_until_ready(batch)


def measure(work: Callable[[int], None], size: Size) -> Measurement:
    """Return the bytecodes and the peak of memory that each further batch costs."""
    for _ in range(2):  # what is imported, compiled or cached once
        work(_FEW)
    few, many = (count_bytecodes(partial(work, count)) for count in (_FEW, _FEW + size.batches))
    return Measurement(
        {
            "bytecodes": (many - few) / size.batches,
            "memory": (_peak(work, _FEW + size.batches) - _peak(work, _FEW)) / size.batches,
        },
        {"bytecodes of a few batches": few},
    )


def _peak(work: Callable[[int], None], batches: int) -> float:
    """Return the largest number of bytes that Python's objects took beyond those before."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        work(batches)
        _, peak = tracemalloc.get_traced_memory()
        return peak - before
    finally:
        tracemalloc.stop()


def _variant(name: str, work: Callable[[int], None], note: str = "") -> Variant:
    return Variant(name, partial(measure, work), note=note)


WORKLOAD = Workload(
    name="python",
    title="what Python does for each further batch of 64 bytes, on all threads",
    metrics=(Metric("bytecodes", "a batch", "lower"), Metric("memory", "bytes a batch", "lower")),
    baseline=None,
    variants=(
        _variant("device_put", _plain, "a loop without a feed; memory is for the batches, which are made before"),
        _variant("feed of a list", _list),
        _variant("feed of a generator", _generator),
        _variant("feed of a Loader", _loader, "memory is for the records, and 100 bytes"),
        _variant("fit", _fit, "ps.fit over a feed of a Loader, without a log"),
    ),
    sizes={"full": Size(400), "quick": Size(100)},
    # Above what was counted on Python 3.12, by more than feeds on threads vary with the load of the machine.
    targets=(
        Target("feed of a list", "bytecodes", 1900),
        Target("feed of a generator", "bytecodes", 2500),
        Target("feed of a Loader", "bytecodes", 2100),
        Target("fit", "bytecodes", 2400),
        Target(None, "memory", 800),
    ),
    scored=True,
    method=(
        "Counters: bytecodes that Python executed on all threads, and the peak of the memory of Python's objects, each for a few "
        "batches and for many; the difference by the number of further batches."
    ),
)
