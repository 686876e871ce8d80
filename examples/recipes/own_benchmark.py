"""Compare two ways to feed the same records: `penstock bench own_benchmark.py --html report.html`."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

import penstock as ps
from penstock_bench.model import Live, Metric, Target, Variant, VerificationError, Workload


@dataclass(frozen=True)
class Size:
    records: int
    batch: int


def numpy_loop(data: np.ndarray, size: Size) -> Iterator[jax.Array]:
    order = np.random.default_rng(0).permutation(size.records)
    return (jax.device_put(data[rows]) for rows in order.reshape(-1, size.batch))


def with_penstock(data: np.ndarray, size: Size) -> Iterator[jax.Array]:
    with ps.feed(ps.Loader(data, size.batch, shuffle=True, epochs=1)) as batches:
        yield from batches


@contextlib.contextmanager
def live(epoch: Callable[[np.ndarray, Size], Iterator[jax.Array]], size: Size) -> Iterator[Live]:
    """Verify one epoch, which is the warm-up, and give the function that runs a block."""
    data = np.arange(size.records * 784, dtype=np.int32).reshape(-1, 784)
    if sorted(int(row) for batch in epoch(data, size) for row in batch[:, 0]) != data[:, 0].tolist():
        raise VerificationError("an epoch did not have every record once")

    def rate(seconds: float) -> float:
        epochs, begin = 0, time.perf_counter()
        while not epochs or time.perf_counter() - begin < seconds:
            jax.block_until_ready(list(epoch(data, size)))
            epochs += 1
        return epochs * size.records / (time.perf_counter() - begin)

    yield Live({"rate": rate})


WORKLOADS = [
    Workload(
        name="my-records",
        title="{records:,} records of 3 KB, shuffled, in batches of {batch}",
        metrics=(Metric("rate", "records/s", "higher"),),
        baseline="numpy",
        variants=(Variant("numpy", live=partial(live, numpy_loop)), Variant("penstock", live=partial(live, with_penstock))),
        sizes={"full": Size(records=51_200, batch=128), "quick": Size(records=1_280, batch=128)},
        targets=(Target("penstock", "rate", 0.8, "numpy"),),
        verifies="each record once",
    )
]
