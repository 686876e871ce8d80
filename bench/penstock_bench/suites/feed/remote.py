"""Measure Parquet files behind HTTP that are read through the cache, against the same files on the local disk."""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import jax
import numpy as np

import penstock as ps
from penstock_bench.garbage_collector import freeze_gc
from penstock_bench.model import Measurement, Metric, Target, Variant, VerificationError, Workload
from penstock_bench.suites.feed.batch import Batch, block_until_ready
from penstock_bench.suites.feed.check import check_epoch
from penstock_bench.suites.feed.tokens import make_tokens, read_ids

_BATCH = 128
_FIRST, _SECOND, _LATER = "first epoch", "second epoch", "epoch of a later run"
_BESIDE = "second epoch beside local files"


@dataclass(frozen=True)
class Size:
    """The number of rows of 256 tokens, over all files.

    Attributes:
      rows: rows in an epoch.
      files: number of Parquet files.
      repeats: how often the second epoch and a later run are measured; the median counts.
      pairs: how often an epoch of local files follows one of these files, or precedes it.
    """

    rows: int
    files: int
    repeats: int
    pairs: int


@contextlib.contextmanager
def _served(folder: str) -> Iterator[list[str]]:
    """Serve a folder over HTTP from another process, and give the URLs of its files."""
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        port = re.search(r"port (\d+)", server.stdout.readline())
        try:
            assert port is not None
            yield [f"http://127.0.0.1:{port[1]}/{name}" for name in sorted(os.listdir(folder))]
        finally:
            server.kill()


@contextlib.contextmanager
def _local(folder: str) -> Iterator[Callable[[], Any]]:
    yield lambda: _paths(folder)


@contextlib.contextmanager
def _remote(folder: str) -> Iterator[Callable[[], Any]]:
    with tempfile.TemporaryDirectory() as cache, _served(folder) as urls:
        yield lambda: ps.remote(urls, cache=cache)


def _paths(folder: str) -> list[str]:
    return sorted(os.path.join(folder, name) for name in os.listdir(folder))


def _write(tokens: np.ndarray, files: int, folder: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    for number, rows in enumerate(np.array_split(tokens, files)):
        table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])})
        pyarrow.parquet.write_table(table, os.path.join(folder, f"{number:03}.parquet"))


def _timed(batches: Iterator[Batch], count: int) -> float:
    """Return the seconds until a number of batches are ready on the device."""
    begin = time.perf_counter()
    for _ in range(count):
        block_until_ready(next(batches))
    return time.perf_counter() - begin


def measure(opened: Callable[[str], contextlib.AbstractContextManager[Callable[[], Any]]], size: Size) -> Measurement:
    """Measure rows per second in the first epoch, the second one, and the first one of a later run.

    The first epoch of a run includes listing and opening the files. Without a cached copy, it also includes their download.
    At last, second epochs of these files and of the local ones take turns in this process, as two processes may differ by half.
    """
    device, tokens = jax.devices()[0], make_tokens(size.rows)
    steps = size.rows // _BATCH
    with tempfile.TemporaryDirectory() as folder, opened_files(opened, tokens, size, folder) as data:

        def run(epochs: int) -> list[float]:
            begin = time.perf_counter()
            loader = ps.Loader(data(), _BATCH, shuffle=True, seed=42)
            opening = time.perf_counter() - begin
            with ps.feed(loader, to=device) as batches:
                seconds = [_timed(batches, steps) for _ in range(epochs)]
            return [opening + seconds[0], *seconds[1:]]

        freeze_gc()
        first, *second = run(1 + size.repeats)
        later = [run(1)[0] for _ in range(size.repeats)]
        beside = _take_turns([data(), _paths(folder)], steps, size.pairs, device)
        with ps.feed(ps.Loader(data(), _BATCH, shuffle=True, seed=42, epochs=1), to=device) as batches:
            check_epoch(batches, lambda batch: read_ids(batch, tokens, device, _BATCH), size.rows, _BATCH)
    if min(first, *second, *later) <= 0:
        raise VerificationError("an epoch took no time")
    rows = steps * _BATCH
    values = {_FIRST: rows / first, _SECOND: rows / median(second), _LATER: rows / median(later), _BESIDE: median(beside)}
    return Measurement(values, {"first_s": first, "second_s": second, "later_s": later, "beside": beside})


def _take_turns(pair: list[Any], steps: int, count: int, device: jax.Device) -> list[float]:
    """Return, for each pair of epochs, the time of the second data over the first's; both in a random order."""
    order, ratios = random.Random(0), []
    with contextlib.ExitStack() as stack:
        feeds = [stack.enter_context(ps.feed(ps.Loader(data, _BATCH, shuffle=True, seed=42), to=device)) for data in pair]
        for feed in feeds:
            _timed(feed, steps)
        for _ in range(count):
            took = {side: _timed(feeds[side], steps) for side in order.sample([0, 1], 2)}
            ratios.append(took[1] / took[0])
    return ratios


@contextlib.contextmanager
def opened_files(
    opened: Callable[[str], contextlib.AbstractContextManager[Callable[[], Any]]], tokens: np.ndarray, size: Size, folder: str
) -> Iterator[Callable[[], Any]]:
    """Write the files, and give a function that returns the data for a Loader."""
    _write(tokens, size.files, folder)
    with opened(folder) as data:
        yield data


WORKLOAD = Workload(
    name="remote",
    title="{files} Parquet files with {rows:,} rows of 256 int32, shuffled, batches of 128 on the device",
    metrics=(
        *(Metric(name, "rows/s", "higher") for name in (_FIRST, _SECOND, _LATER)),
        Metric(_BESIDE, "× local files", "higher"),
    ),
    baseline="local files",
    variants=(
        Variant("local files", partial(measure, _local), ("pyarrow",), "ps.Loader over the local files"),
        Variant(
            "remote files",
            partial(measure, _remote),
            ("pyarrow", "fsspec", "aiohttp"),
            "ps.remote over HTTP of this machine, with an empty cache before the first epoch",
        ),
    ),
    sizes={"full": Size(rows=100_000, files=16, repeats=5, pairs=12), "quick": Size(rows=13_000, files=4, repeats=2, pairs=2)},
    targets=(Target("remote files", _BESIDE, 0.9),),  # a later run also asks the store for versions
)
