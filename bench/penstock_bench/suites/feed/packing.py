"""Measure documents packed into rows of one length: tokens per second, how full the rows are, and the time to the first batch.

Another workload compares step 10^9 of packed documents with step 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import jax
import numpy as np

import penstock as ps
from penstock.data import Documents
from penstock_bench.garbage_collector import freeze_gc
from penstock_bench.model import Measurement, Metric, Target, Variant, VerificationError, Workload
from penstock_bench.suites.feed.batch import Batch, block_until_ready
from penstock_bench.suites.feed.check import check_leaf
from penstock_bench.suites.feed.grain_notes import GRAIN_IN_MEMORY

_LENGTH, _BATCH, _SEED = 2048, 16, 42
_SHORTEST, _LONGEST = 10, 2000


@dataclass(frozen=True)
class Size:
    """The amount of text, and how long to time it.

    Attributes:
      documents: number of documents.
      slow_documents: the same for the slow variants. The time of a token does not depend on the number of documents.
      seconds: the least time to measure.
      repeats: how often each step is read, to compare steps.
    """

    documents: int
    slow_documents: int
    seconds: float
    repeats: int


def make_documents(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random tokens, int32 [T] and never 0, and the offsets of documents of 10 to 2,000 tokens, int64 [count + 1]."""
    random = np.random.default_rng(_SEED)
    offsets = np.concatenate([[0], np.cumsum(random.integers(_SHORTEST, _LONGEST + 1, count))])
    return random.integers(1, 50_000, offsets[-1], np.int32), offsets


Make = Callable[[np.ndarray, np.ndarray, jax.Device], Callable[[], Iterator[Batch]]]


def _grain(kind: str, tokens: np.ndarray, offsets: np.ndarray, device: jax.Device) -> Callable[[], Iterator[Batch]]:
    import grain

    documents = [{"tokens": x} for x in np.split(tokens, offsets[1:-1])]
    pack = {
        "concat": grain.experimental.ConcatThenSplitIterDataset,
        "first fit": partial(grain.experimental.FirstFitPackIterDataset, num_packing_bins=64),
        "best fit": partial(grain.experimental.BestFitPackIterDataset, num_packing_bins=64),
    }[kind]

    def epoch() -> Iterator[Batch]:
        ordered = grain.MapDataset.source(documents).seed(_SEED).shuffle()
        packed = pack(ordered.to_iter_dataset(grain.ReadOptions(num_threads=0)), length_struct={"tokens": _LENGTH})
        batches = packed.batch(_BATCH, drop_remainder=False)
        return iter(grain.experimental.device_put(ds=batches, device=device, cpu_buffer_size=4, device_buffer_size=2))

    return epoch


def _penstock(kind: str, tokens: np.ndarray, offsets: np.ndarray, device: jax.Device) -> Callable[[], Iterator[Batch]]:
    packed = ps.pack(Documents(tokens, offsets), _LENGTH, method="concat" if kind == "concat" else "best_fit", seed=_SEED)

    def epoch() -> Iterator[Batch]:
        loader = ps.Loader(packed, _BATCH, shuffle=True, seed=_SEED, epochs=1, remainder="pad")
        with ps.feed(loader, to=device, host_buffer=4, device_buffer=2) as batches:
            yield from batches

    return epoch


def _check(batches: Iterator[Batch], tokens: np.ndarray, device: jax.Device) -> float:
    """Check that an epoch holds each token as often as the documents do, and return the part of it that is not padding."""
    counts, places = np.zeros(50_000, np.int64), 0
    for batch in batches:
        got = check_leaf("tokens", batch["tokens"], (len(batch["tokens"]), _LENGTH), np.int32, device)
        got = got[np.asarray(batch["mask"])] if "mask" in batch else got  # rows that fill the last batch
        places += got.size
        counts += np.bincount(got.ravel(), minlength=50_000)
    if not np.array_equal(counts[1:], np.bincount(tokens, minlength=50_000)[1:]):
        raise VerificationError(
            f"an epoch holds {counts[1:].sum():,} tokens, or other ones than the {len(tokens):,} of the documents"
        )
    return float(counts[1:].sum() / places)


def measure(make: Make, slow: bool, size: Size) -> Measurement:
    """Measure one way of packing. The time to the first batch includes the index, where there is one."""
    device = jax.devices()[0]
    tokens, offsets = make_documents(size.slow_documents if slow else size.documents)
    fullness = _check(make(tokens, offsets, device)(), tokens, device)
    freeze_gc()
    begin = time.perf_counter()
    epoch = make(tokens, offsets, device)
    batches = epoch()
    block_until_ready(next(batches))
    start = time.perf_counter() - begin
    del batches
    spent, epochs = 0.0, 0
    while spent < size.seconds or not epochs:
        begin = time.perf_counter()
        for batch in epoch():
            block_until_ready(batch)
        spent += time.perf_counter() - begin
        epochs += 1
    values = {"throughput": epochs * len(tokens) / spent / 1e6, "fullness": 100 * fullness, "first batch": start * 1e3}
    return Measurement(values, {"timed_epochs": epochs, "documents": len(offsets) - 1, "tokens": len(tokens)})


_NOTE = f"shuffled; {GRAIN_IN_MEMORY}; {{slow_documents:,}} documents"

WORKLOAD = Workload(
    name="packing",
    title="{documents:,} documents of 10 to 2,000 int32 tokens in rows of 2,048, batches of 16 rows on the device",
    metrics=(
        Metric("throughput", "M tokens/s", "higher"),
        Metric("fullness", "%", "higher", ideal=100),
        Metric("first batch", "ms", "lower"),
    ),
    baseline="grain best fit",
    variants=(
        *(
            Variant(f"grain {kind}", partial(measure, partial(_grain, kind), True), ("grain",), _NOTE + bins)
            for kind, bins in (("best fit", "; 64 bins"), ("first fit", "; 64 bins"), ("concat", ""))
        ),
        Variant("penstock best fit", partial(measure, partial(_penstock, "best fit"), False), note="windows of 16,384 documents"),
        Variant("penstock concat", partial(measure, partial(_penstock, "concat"), False)),
    ),
    sizes={
        "full": Size(documents=20_000, slow_documents=5_000, seconds=1.0, repeats=30),
        "quick": Size(documents=1_500, slow_documents=300, seconds=0.0, repeats=5),
    },
    targets=(
        Target("penstock best fit", "throughput", 10),
        Target("penstock best fit", "fullness", 96),
        Target("penstock concat", "throughput", 10),
    ),
)


_STEPS = {"step 0": 0, "step 10^9": 10**9}


def measure_steps(size: Size) -> Measurement:
    """Measure the median time of a step, with a new Loader for each. The steps take turns."""
    packed = ps.pack(Documents(*make_documents(size.documents)), _LENGTH)
    times: dict[str, list[float]] = {name: [] for name in _STEPS}
    for _ in range(size.repeats + 1):
        for name, step in _STEPS.items():
            begin = time.perf_counter()
            ps.Loader(packed, _BATCH, shuffle=True, seed=_SEED)[step]
            times[name].append((time.perf_counter() - begin) * 1e3)
    values = {name: median(each[1:]) for name, each in times.items()}
    return Measurement({**values, "ratio": values["step 10^9"] / values["step 0"]}, {"ms": times})


STEPS = Workload(
    name="packing steps",
    title="milliseconds from a new Loader over packs of {documents:,} documents to its batch at a step",
    metrics=(*(Metric(name, "ms", "lower") for name in _STEPS), Metric("ratio", "×", "lower")),
    baseline=None,
    variants=(Variant("penstock", measure_steps, note="best fit"),),
    sizes=WORKLOAD.sizes,
    targets=(Target("penstock", "ratio", 2),),
)
