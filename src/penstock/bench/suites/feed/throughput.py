"""Measure records per second through a pipeline, over whole epochs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from penstock.bench.garbage_collector import freeze_gc
from penstock.bench.model import Measurement, VerificationError
from penstock.bench.suites.feed.batch import Batch, block_until_ready

Epoch = Callable[[int], Iterator[Batch]]  # from an epoch's number to its device batches


def rows_per_second(
    epoch: Epoch, check: Callable[[Iterator[Batch]], None], batches: int, batch_size: int, seconds: float
) -> Measurement:
    """Time complete epochs, from the request for an epoch's iterator to its end, with each batch ready on the device.

    So the start of a pipeline is timed, and no batch is made before the clock starts.

    Args:
      epoch: a function from an epoch's number to its batches.
      check: raises `VerificationError`. It gets the first epoch, which is the warm-up and not timed.
      batches: number of batches in an epoch; the timed epochs are checked to have as many.
      batch_size: records in a batch.
      seconds: epochs are added until at least this time was measured.
    """
    check(epoch(0))
    freeze_gc()
    spent, epochs = 0.0, 0
    while spent < seconds or not epochs:
        epochs += 1
        had = 0
        begin = time.perf_counter()
        for batch in epoch(epochs):
            block_until_ready(batch)
            had += 1
        spent += time.perf_counter() - begin
        if had != batches:
            raise VerificationError(f"epoch {epochs} has {had} batches, not {batches}")
    rows = epochs * batches * batch_size
    return Measurement({"throughput": rows / spent}, {"timed_epochs": epochs, "timed_rows": rows, "timed_s": spent})
