"""Measure a mixture of three sources beside one source with the same records, and step 10^9 of it beside step 0.

Both are fed in one process, where they take turns in short blocks. The ratio is of neighbouring blocks, so it does not
contain the difference between two processes.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import penstock as ps
from penstock_bench.garbage_collector import freeze_gc
from penstock_bench.model import Measurement, Metric, Target, Variant, VerificationError, Workload
from penstock_bench.suites.feed.batch import block_until_ready

_WEIGHTS = (0.5, 0.3, 0.2)
_SHAPES = {"784 B": ((784,), np.uint8), "3 KB": ((3072,), np.uint8), "8 KB": ((2048,), np.int32)}
_TOKENS = 512  # of a window and of a pack
_SEED = 7


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
      records: number of records of each source.
      blocks: number of blocks of each side.
      seconds: length of a block.
    """

    records: int
    blocks: int
    seconds: float


class Kind(NamedTuple):
    """Sources of one kind.

    Attributes:
      parts: the sources of the mixture.
      together: one source with the same records.
      source_of: from a batch to the number of the source of each row, int [n]; raises VerificationError if a row is wrong.
    """

    parts: list[Any]
    together: Any
    source_of: Callable[[Any], np.ndarray]


def _arrays(records: int, shape: tuple[int, ...], dtype: type) -> Kind:
    random = np.random.default_rng(_SEED)
    parts: list[dict[str, np.ndarray]] = [
        {"x": random.integers(0, 100, (records, *shape)).astype(dtype), "id": np.arange(records, dtype=np.int32) + i * records}
        for i in range(len(_WEIGHTS))
    ]
    together = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}

    def source_of(batch: Any) -> np.ndarray:
        _verify((batch["x"] == together["x"][batch["id"]]).all(), "other rows than their ids say")
        return batch["id"] // records

    return Kind(parts, together, source_of)


def _windows(records: int) -> Kind:
    """Make windows of memory-mapped files of tokens, which count up."""
    count = records * _TOKENS
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "tokens.npy")
        np.save(path, np.arange(count * len(_WEIGHTS), dtype=np.int32))
        together = np.load(path, mmap_mode="r")  # keeps the file on the disk as long as it is mapped
    parts = [together[i * count : (i + 1) * count] for i in range(len(_WEIGHTS))]

    def source_of(batch: Any) -> np.ndarray:
        _verify((np.diff(batch) == 1).all() and not (batch[:, 0] % _TOKENS).any(), "rows that are no windows")
        return batch[:, 0] // count

    return Kind([ps.windows(part, _TOKENS) for part in parts], ps.windows(together, _TOKENS), source_of)


def _packs(records: int) -> Kind:
    """Make packs of documents of 10 to 1,000 tokens, each of which is the number of its source."""
    lengths = np.random.default_rng(_SEED).integers(10, 1000, records // 2)
    documents = [[np.full(n, i, np.int32) for n in lengths.tolist()] for i in range(len(_WEIGHTS))]
    together = [document for part in documents for document in part]

    def source_of(batch: Any) -> np.ndarray:
        first = batch["tokens"][:, :1]
        _verify(((batch["tokens"] == first) | (batch["segment_ids"] == 0)).all(), "packs of several sources")
        return first[:, 0]

    return Kind([ps.pack(part, _TOKENS) for part in documents], ps.pack(together, _TOKENS), source_of)


_KINDS: dict[str, Callable[[int], Kind]] = {
    **{name: partial(_arrays, shape=shape, dtype=dtype) for name, (shape, dtype) in _SHAPES.items()},
    "windows": _windows,
    "packs": _packs,
}


def _verify(holds: bool, wrong: str) -> None:
    if not holds:
        raise VerificationError(f"a batch has {wrong}")


def _check(loader: ps.Loader, kind: Kind, batch_size: int) -> None:
    """Check the contents and the shares of some steps, near and far."""
    for step in (0, 1, 10**9):
        shares = np.bincount(kind.source_of(loader[step]), minlength=len(_WEIGHTS)) / batch_size
        if abs(shares - _WEIGHTS).max() > len(_WEIGHTS) / batch_size:
            raise VerificationError(f"step {step} has the shares {shares}, and {_WEIGHTS} are wanted")


def _rows_per_second(feed: ps.Feed, batch_size: int, seconds: float) -> float:
    batches, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds:
        block_until_ready(next(feed))
        batches += 1
    return batches * batch_size / spent


def measure(batch_size: int, size: Size) -> Measurement:
    metrics: dict[str, float] = {}
    for name, make in _KINDS.items():
        kind = make(size.records)
        mixed = ps.Loader(ps.mix(kind.parts, _WEIGHTS), batch_size, shuffle=True, seed=_SEED)
        one = ps.Loader(kind.together, batch_size, shuffle=True, seed=_SEED)
        _check(mixed, kind, batch_size)
        with ps.feed(one) as first, ps.feed(mixed) as second:
            for feed in (first, second):
                _rows_per_second(feed, batch_size, size.seconds)
            freeze_gc()
            ratios = []
            for _ in range(size.blocks):
                alone = _rows_per_second(first, batch_size, size.seconds)
                ratios.append(_rows_per_second(second, batch_size, size.seconds) / alone)
        metrics[name] = median(ratios)
    metrics["far"] = _far_over_near(mixed, size.blocks)
    return Measurement(metrics, {"blocks": size.blocks, "seconds": size.seconds})


def _far_over_near(loader: ps.Loader, repeats: int) -> float:
    """Return the time of a step at 10^9 over the time of a step near 0, each in a block of steps of its own."""

    def seconds(step: int) -> float:
        begin = time.perf_counter()
        loader[step]
        return time.perf_counter() - begin

    apart = 1_000_000  # so that no block of indices is computed for two of them
    ratios = [seconds(10**9 + i * apart) / seconds(i * apart) for i in range(repeats)]
    return median(ratios)


_NOTE = f"records of 784 B, 3 KB and 8 KB, windows and packs of {_TOKENS} tokens; far: step 10^9, by itself"

WORKLOAD = Workload(
    name="mixture",
    title="three sources mixed beside one source with the same records, batches of 128 and 1,024 on the device",
    metrics=(
        *(Metric(name, "× one source", "higher") for name in _KINDS),
        Metric("far", "× step 0", "lower"),
    ),
    baseline=None,
    variants=tuple(Variant(f"batch {rows:,}", partial(measure, rows), note=_NOTE) for rows in (128, 1024)),
    sizes={"full": Size(20_000, 40, 0.1), "quick": Size(1_000, 2, 0.02)},
    targets=tuple(
        target
        for rows in (128, 1024)
        for target in (
            *(Target(f"batch {rows:,}", name, 0.9) for name in _KINDS),
            Target(f"batch {rows:,}", "far", 2.0),
        )
    ),
)
