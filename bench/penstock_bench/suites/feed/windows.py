"""Measure overlapping windows of one long array of tokens, read by two worker processes: tokens per second, and memory."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

import penstock as ps
from penstock_bench.model import Measurement, Metric, Target, Variant, VerificationError, Workload

_LENGTH, _BATCH, _SEED = 1024, 32, 42
_PERIOD = 65_521  # the tokens count up to this number, over and over


@dataclass(frozen=True)
class Size:
    """The amount of tokens.

    Attributes:
      tokens: tokens in the array.
      batches: batches to time.
      few_tokens: tokens in the array whose pipeline is subtracted from the memory: it has the processes and not the array. None
        subtracts nothing, for quick runs.
    """

    tokens: int
    batches: int
    few_tokens: int | None


def _in_memory(tokens: np.ndarray, path: Path) -> np.ndarray:
    return tokens


def _memmap(tokens: np.ndarray, path: Path) -> np.ndarray:
    tokens.tofile(path)
    return np.memmap(path, tokens.dtype, "r")


def _proportional_bytes() -> int:
    """Return the proportional set size of this process and of all below it: shared memory is counted once over all of them."""
    import psutil

    this = psutil.Process()
    return sum(process.memory_full_info().pss for process in (this, *this.children(recursive=True)))


def _check(batch: np.ndarray) -> None:
    steps = np.diff(batch.astype(np.int64), axis=1)
    if batch.shape != (_BATCH, _LENGTH + 1) or not np.isin(steps, (1, 1 - _PERIOD)).all():
        raise VerificationError("a window is not consecutive tokens of the array")


def _read(array: np.ndarray, batches: int) -> tuple[float, int]:
    """Read batches through two processes. Return the tokens per second after a warm-up, and the bytes of all processes."""
    loader = ps.Loader(ps.windows(array, _LENGTH + 1, stride=_LENGTH), _BATCH, shuffle=True, seed=_SEED, workers="process:2")
    iterator: Iterator[np.ndarray] = iter(loader)
    for batch in islice(iterator, 8):
        _check(batch)
    begin = time.perf_counter()
    for batch in islice(iterator, batches):
        batch[0, 0] = 0  # the batch is the consumer's
    seconds = time.perf_counter() - begin
    return batches * _BATCH * _LENGTH / seconds, _proportional_bytes()


def measure(place: Callable[[np.ndarray, Path], np.ndarray], size: Size) -> Measurement:
    """Measure the throughput, and the memory that reading adds, in multiples of the array."""
    tokens = np.resize(np.arange(_PERIOD, dtype=np.uint16), size.tokens)
    with tempfile.TemporaryDirectory() as folder:
        few = None
        if size.few_tokens is not None:
            _, few = _read(place(tokens[: size.few_tokens].copy(), Path(folder, "few")), 8)
        array = place(tokens, Path(folder, "all"))
        throughput, bytes_in_all = _read(array, size.batches)
    added = bytes_in_all - (_proportional_bytes() if few is None else few)
    return Measurement({"throughput": throughput / 1e6, "memory": added / tokens.nbytes}, {"array_bytes": tokens.nbytes})


WORKLOAD = Workload(
    name="windows",
    title="windows of 1,025 of {tokens:,} uint16 tokens, stride 1,024, shuffled, read by 2 worker processes in batches of 32",
    metrics=(Metric("throughput", "M tokens/s", "higher"), Metric("memory", "× the array", "lower")),
    baseline=None,
    variants=(
        Variant("in memory", partial(measure, _in_memory), ("psutil",), "memory is what reading adds to the array of the caller"),
        Variant("memmap", partial(measure, _memmap), ("psutil",), "memory is the mapped part of the file"),
    ),
    sizes={
        "full": Size(tokens=256_000_000, batches=1_500, few_tokens=1_000_000),
        "quick": Size(tokens=8_000_000, batches=20, few_tokens=None),
    },
    targets=tuple(
        Target(name, metric, bound) for name in ("in memory", "memmap") for metric, bound in (("throughput", 1), ("memory", 1.5))
    ),
)
