"""Measure records per second through a pipeline, over whole epochs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from penstock.bench.model import VerificationError
from penstock.bench.suites.feed.batch import Batch, block_until_ready

Epoch = Callable[[int], Iterator[Batch]]  # from an epoch's number to its device batches


def rows_per_second(
    epoch: Epoch, check: Callable[[Iterator[Batch]], None], batches: int, batch_size: int
) -> Callable[[float], float]:
    """Check an epoch, and return the function of a block, which gives records per second.

    A block is complete epochs, from the request for an epoch's iterator to its end, with each batch ready on the device. So the
    start of a pipeline is timed, and no batch is made before the clock starts.

    Args:
      epoch: a function from an epoch's number to its batches.
      check: raises `VerificationError`. It gets the first epoch, which is the warm-up and not timed.
      batches: number of batches in an epoch; the timed epochs are checked to have as many.
      batch_size: records in a batch.
    """
    check(epoch(0))
    epochs = 0

    def block(seconds: float) -> float:
        nonlocal epochs
        before, spent = epochs, 0.0
        while spent < seconds or epochs == before:
            epochs += 1
            had = 0
            begin = time.perf_counter()
            for batch in epoch(epochs):
                block_until_ready(batch)
                had += 1
            spent += time.perf_counter() - begin
            if had != batches:
                raise VerificationError(f"epoch {epochs} has {had} batches, not {batches}")
        return (epochs - before) * batches * batch_size / spent

    return block
