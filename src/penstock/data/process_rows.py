"""The rows of a global batch that one process reads.

A step and (process index, process count) go in; the rows and their record indices come out. Process p of n reads the rows
`p·B/n … (p+1)·B/n` of a global batch of B rows. This is the part that `jax.make_array_from_process_local_data` expects of a
process if the batch is sharded along its first dimension over all processes.
"""

from __future__ import annotations

import numpy as np

from penstock.data.order import Order


def process_rows(order: Order, step: int, process: tuple[int, int]) -> tuple[int, int]:
    """Cut a global batch for one process.

    Args:
      order: the records of all steps.
      step: number of the global batch.
      process: (index, count).

    Returns:
      (start, stop): the process reads the rows `start … stop - 1` of the global batch. With `remainder="pad"`, a batch always
      has `batch_size` rows.
    """
    index, count = process
    rows = order.batch_size if order.remainder == "pad" else order.rows(step)
    return index * rows // count, (index + 1) * rows // count


def record_indices(order: Order, step: int, start: int, stop: int) -> np.ndarray:
    """Return the record indices, int64 [stop - start], of some rows of a global batch. Padding rows repeat the last record."""
    rows = order.rows(step)
    if stop <= rows:
        return order.indices(step, start, stop)
    real = order.indices(step, start, rows) if start < rows else np.empty(0, np.int64)
    last = order.indices(step, rows - 1, rows)
    return np.concatenate([real, last.repeat(stop - max(start, rows))])
