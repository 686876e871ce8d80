"""Compare two ways to feed your data, with the harness of `penstock bench`: interleaved runs, intervals, an A/A control.

pip install penstock && python own_benchmark.py 10  # rounds; fewer than 6 give no interval
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace as Size

import jax
import numpy as np
from rich.console import Console

import penstock as ps
from penstock.bench import machine, report
from penstock.bench.model import Measurement, Metric, Variant, VerificationError, Workload
from penstock.bench.outcome import Run
from penstock.bench.rounds import Harness


def numpy_loop(data: np.ndarray, size: Size) -> Iterator[jax.Array]:
    order = np.random.default_rng(0).permutation(size.records)
    return (jax.device_put(data[rows]) for rows in order.reshape(-1, size.batch))


def with_penstock(data: np.ndarray, size: Size) -> Iterator[jax.Array]:
    with ps.feed(ps.Loader(data, size.batch, shuffle=True, epochs=1)) as batches:
        yield from batches


def measure(epoch: Callable[[np.ndarray, Size], Iterator[jax.Array]], size: Size) -> Measurement:
    """Verify one epoch, and time another one. Each run has a fresh process."""
    data = np.arange(size.records * 784, dtype=np.int32).reshape(-1, 784)
    if sorted(int(row) for batch in epoch(data, size) for row in batch[:, 0]) != data[:, 0].tolist():
        raise VerificationError("an epoch did not have every record once")
    begin = time.perf_counter()
    jax.block_until_ready(list(epoch(data, size)))
    return Measurement({"rate": size.records / (time.perf_counter() - begin)})


WORKLOAD = Workload(
    name="my-records",
    title="{records:,} records of 3 KB, shuffled, in batches of {batch}",
    metrics=(Metric("rate", "records/s", "higher"),),
    baseline="numpy",
    variants=(Variant("numpy", partial(measure, numpy_loop)), Variant("penstock", partial(measure, with_penstock))),
    sizes={"full": Size(records=51_200, batch=128)},
)
WORKLOADS = [WORKLOAD]  # where each process finds it

if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.path.dirname(__file__) + os.pathsep + os.environ.get("PYTHONPATH", "")  # to import this file
    with Harness([("own_benchmark", WORKLOAD)], "full", seed=0) as harness:
        for number in range(int(sys.argv[1]) if sys.argv[1:] else 10):
            harness.round(number)
        result = Run("my suite", "full", harness.seed, machine.describe(), harness.outcomes(), harness.seconds)
    report.print_report(Console(), result)
    assert not result.outcomes[0].failures
