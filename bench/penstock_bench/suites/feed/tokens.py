"""Measure rows of tokens from a Hugging Face dataset, shuffled, in batches of 128 and of 1,024 on the device."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

import penstock as ps
from penstock_bench.garbage_collector import freeze_gc
from penstock_bench.model import Live, Measurement, Metric, Target, Variant, VerificationError, Workload
from penstock_bench.suites.feed.batch import Batch
from penstock_bench.suites.feed.check import check_epoch, check_leaf
from penstock_bench.suites.feed.grain_notes import GRAIN_DEFAULT, GRAIN_IN_MEMORY
from penstock_bench.suites.feed.throughput import Epoch, RowsPerSecond

_BATCHES = (128, 1024)  # 33 and 262 thousand tokens
_LENGTH = 256
_SEED = 42


@dataclass(frozen=True)
class Size:
    """The amount of tokens.

    Attributes:
      rows: rows in an epoch.
      slow_rows: rows in an epoch of the slow variants. The time of a row does not depend on the length of the epoch.
      shards: number of files of the saved dataset.
    """

    rows: int
    slow_rows: int
    shards: int


def make_tokens(rows: int) -> np.ndarray:
    """Return random tokens, int32 [rows, 256]; the first of a row is its index."""
    tokens = np.random.default_rng(_SEED).integers(0, 50_000, (rows, _LENGTH), np.int32)
    tokens[:, 0] = np.arange(rows)
    return tokens


def read_ids(batch: Batch, tokens: np.ndarray, device: jax.Device, batch_size: int) -> np.ndarray:
    """Return the row indices in a batch, after a check that it holds exactly those rows."""
    got = check_leaf("tokens", batch["tokens"], (batch_size, _LENGTH), np.int32, device)
    ids = got[:, 0]
    if ids.min() < 0 or ids.max() >= len(tokens) or not np.array_equal(got, tokens[ids]):
        raise VerificationError("a row's tokens differ from its record's")
    return ids


def _grain(dataset: Any, device: jax.Device, batch_size: int, threads: int | None = None) -> Epoch:
    import grain

    read_options = None if threads is None else grain.ReadOptions(num_threads=threads)

    def epoch(number: int) -> Iterator[Batch]:
        ds = (
            grain.MapDataset.source(dataset)
            .seed(_SEED + number)
            .shuffle()
            .map(lambda r: {"tokens": np.asarray(r["tokens"], np.int32)})
            .batch(batch_size=batch_size, drop_remainder=True)
            .to_iter_dataset(read_options)
        )
        return iter(grain.experimental.device_put(ds=ds, device=device, cpu_buffer_size=4, device_buffer_size=2))

    return epoch


def _grain_numpy(dataset: Any, device: jax.Device, batch_size: int) -> Epoch:
    return _grain(dataset.with_format("numpy"), device, batch_size)


def _datasets_loop(dataset: Any, device: jax.Device, batch_size: int) -> Epoch:
    def epoch(number: int) -> Iterator[Batch]:
        shuffled = dataset.shuffle(seed=_SEED + number).with_format("numpy")
        for batch in shuffled.iter(batch_size, drop_last_batch=True):
            yield jax.device_put({"tokens": batch["tokens"].astype(np.int32, copy=False)}, device)

    return epoch


def _penstock(dataset: Any, device: jax.Device, batch_size: int) -> Epoch:
    def epoch(number: int) -> Iterator[Batch]:
        loader = ps.Loader(dataset, batch_size, shuffle=True, seed=_SEED + number, epochs=1)
        with ps.feed(loader, to=device, host_buffer=4, device_buffer=2) as batches:
            yield from batches

    return epoch


@contextlib.contextmanager
def live(make: Callable[[Any, jax.Device, int], Epoch], slow: bool, saved: bool, size: Size) -> Iterator[Live]:
    """Measure the throughput of one pipeline over a dataset in memory, or one that was saved to disk and loaded again."""
    import datasets

    rows, device = size.slow_rows if slow else size.rows, jax.devices()[0]
    tokens = make_tokens(rows)
    features = datasets.Features(tokens=datasets.List(datasets.Value("int32")))
    dataset = datasets.Dataset.from_dict({"tokens": tokens}, features=features)

    blocks: dict[str, RowsPerSecond] = {}
    with tempfile.TemporaryDirectory() as folder:
        if saved:
            dataset.save_to_disk(folder, num_shards=size.shards)
            dataset = datasets.load_from_disk(folder)
        for batch_size in _BATCHES:

            def check(batches: Iterator[Batch], batch_size: int = batch_size) -> None:
                check_epoch(batches, lambda batch: read_ids(batch, tokens, device, batch_size), rows, batch_size)

            epoch = make(dataset, device, batch_size)
            blocks[_metric(batch_size)] = RowsPerSecond(epoch, check, rows // batch_size, batch_size)
        freeze_gc()
        chunks = dataset.data.table["tokens"].num_chunks
        yield Live(
            blocks, lambda: Measurement(details={**{name: block.details for name, block in blocks.items()}, "chunks": chunks})
        )


def _metric(batch_size: int) -> str:
    return f"throughput, batch {batch_size:,}"


_SLOW = "epochs of {slow_rows:,} rows"


def _variant(
    name: str,
    make: Callable[[Any, jax.Device, int], Epoch],
    note: str = "",
    requires: tuple[str, ...] = (),
    slow: bool = False,
    saved: bool = False,
) -> Variant:
    return Variant(name, requires=(*requires, "datasets"), note=note, live=partial(live, make, slow, saved))


WORKLOAD = Workload(
    name="tokens",
    title="Hugging Face dataset of {rows:,} rows of 256 int32, shuffled, batches on the device",
    metrics=tuple(Metric(_metric(batch_size), "rows/s", "higher") for batch_size in _BATCHES),
    baseline="grain C",
    variants=(
        _variant("grain C", _grain, f"{GRAIN_DEFAULT}; {_SLOW}", ("grain",), slow=True),
        _variant("grain C, 0 threads", partial(_grain, threads=0), f"{GRAIN_IN_MEMORY}; {_SLOW}", ("grain",), slow=True),
        _variant(
            "grain C, with_format",
            _grain_numpy,
            f'over dataset.with_format("numpy"); {GRAIN_DEFAULT}; {_SLOW}',
            ("grain",),
            slow=True,
        ),
        _variant("datasets alone", _datasets_loop, f"shuffle, with_format, iter, device_put; {_SLOW}", slow=True),
        _variant("penstock", _penstock),
        _variant("penstock, from disk", _penstock, "save_to_disk, load_from_disk: memory-mapped, in many chunks", saved=True),
    ),
    sizes={
        "full": Size(rows=20_000, slow_rows=4_096, shards=8),
        "quick": Size(rows=2_600, slow_rows=1_100, shards=2),
    },
    targets=tuple(Target("penstock", _metric(batch_size), 500, "grain C") for batch_size in _BATCHES),
    verifies="each record once, with the right bytes, on the right device",
)
