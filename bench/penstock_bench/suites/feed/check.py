"""Check the batches that a variant delivered, outside of the timed part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from penstock_bench.model import VerificationError
from penstock_bench.suites.feed.batch import Batch


def check_leaf(name: str, leaf: Any, shape: tuple[int, ...], dtype: Any, device: jax.Device) -> np.ndarray:
    """Check that a leaf is an array on the device with this shape and dtype, and return its values.

    Raises:
      VerificationError: it is not.
    """
    if not isinstance(leaf, jax.Array):
        raise VerificationError(f"{name} is {type(leaf).__name__}, not a jax.Array")
    if leaf.devices() != {device}:
        raise VerificationError(f"{name} is on {leaf.devices()}, not on {device}")
    if leaf.shape != shape or leaf.dtype != dtype:
        raise VerificationError(f"{name} is {leaf.dtype}{list(leaf.shape)}, not {np.dtype(dtype)}{list(shape)}")
    return np.asarray(leaf)


def check_epoch(batches: Iterator[Batch], read_ids: Callable[[Batch], np.ndarray], records: int, batch_size: int) -> None:
    """Check that an epoch, shuffled and without its remainder, has enough records and none of them twice.

    Args:
      batches: the batches of the epoch.
      read_ids: a function from a batch to the indices of its records, int [B]. It also checks the batch.
      records: number of records in the data set.
      batch_size: records in a batch.

    Raises:
      VerificationError: a record is there twice, or too many are missing.
    """
    ids = [read_ids(batch) for batch in batches]
    if len(ids) != records // batch_size:
        raise VerificationError(f"an epoch has {len(ids)} batches, not {records // batch_size}")
    seen = np.concatenate(ids)
    if seen.min() < 0 or seen.max() >= records:
        raise VerificationError(f"records {seen.min()} to {seen.max()}, of {records}")
    distinct, times = np.unique(seen, return_counts=True)
    if len(distinct) != len(seen):
        raise VerificationError(f"record {distinct[times.argmax()]} comes {times.max()} times in one epoch")
    if (np.diff(seen) == 1).mean() > 0.5:
        raise VerificationError("the records come in the order of storage, not shuffled")
