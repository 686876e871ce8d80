"""Measure records per second through a pipeline, over whole epochs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from penstock_bench.model import VerificationError
from penstock_bench.suites.feed.batch import Batch, block_until_ready

Epoch = Callable[[int], Iterator[Batch]]  # from an epoch's number to its device batches


class RowsPerSecond:
    """The block of a pipeline: its records per second over whole epochs, after a check of one.

    An epoch is timed from the request for its iterator to its end, with each batch ready on the device. So the start of a
    pipeline is timed, and no batch is made before the clock starts.

    Args:
      epoch: a function from an epoch's number to its batches.
      check: raises `VerificationError`. It gets the first epoch, which is the warm-up and not timed.
      batches: number of batches in an epoch; the timed epochs are checked to have as many.
      batch_size: records in a batch.

    Attributes:
      details: the timed epochs and rows so far.
    """

    def __init__(self, epoch: Epoch, check: Callable[[Iterator[Batch]], None], batches: int, batch_size: int):
        check(epoch(0))
        self._epoch, self._batches, self._batch_size = epoch, batches, batch_size
        self._epochs = 0

    @property
    def details(self) -> dict[str, int]:
        return {"timed_epochs": self._epochs, "timed_rows": self._epochs * self._batches * self._batch_size}

    def __call__(self, seconds: float) -> float:
        """Time epochs for at least this time, and return records per second.

        Raises:
          VerificationError: an epoch has another number of batches.
        """
        before, spent = self._epochs, 0.0
        while spent < seconds or self._epochs == before:
            self._epochs += 1
            had = 0
            begin = time.perf_counter()
            for batch in self._epoch(self._epochs):
                block_until_ready(batch)
                had += 1
            spent += time.perf_counter() - begin
            if had != self._batches:
                raise VerificationError(f"epoch {self._epochs} has {had} batches, not {self._batches}")
        return (self._epochs - before) * self._batches * self._batch_size / spent
