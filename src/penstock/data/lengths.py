"""The lengths of records, by which a Loader puts similar ones into a batch.

A source goes in, integers [N] come out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.data.source import Source
from penstock.data.tree import describe_array, leaves_with_names, unstack

_AT_ONCE = 1024  # records that are read at once to see their lengths


def record_lengths(source: Source, given: Any) -> np.ndarray:
    """Check the lengths of records, or read them.

    Args:
      source: the records.
      given: integers [N] >= 0, or the name of a leaf whose first dimension is the length.

    Returns:
      int64 [N].

    Raises:
      TypeError: `given` is neither.
      ValueError: it has another number of lengths, or some below 0 or from 2**63 on; there is no such leaf, or it is a scalar.
    """
    if isinstance(given, str):
        return _read_lengths(source, given)
    lengths = np.asarray(given)
    if lengths.dtype.kind not in "iu":
        raise TypeError(
            "batch_by_length needs integers, one for each record, or the name of a leaf; got "
            f"{type(given).__name__} of {describe_array(lengths)}"
            + (": give lengths.astype(np.int64)" if lengths.dtype.kind == "f" else "")
        )
    if lengths.shape != (len(source),):
        raise ValueError(
            f"batch_by_length has the shape {lengths.shape}, and there are {len(source):,} records: one length for each"
        )
    if (lengths < 0).any():
        raise ValueError(f"batch_by_length has {int(lengths.min())} at record {int(lengths.argmin())}: lengths need to be >= 0")
    if lengths.max() > np.iinfo(np.int64).max:
        raise ValueError(
            f"batch_by_length has {lengths.max()} at record {int(lengths.argmax())}: lengths need to be less than 2**63"
        )
    return lengths.astype(np.int64)


def _read_lengths(source: Source, name: str) -> np.ndarray:
    lengths = np.empty(len(source), np.int64)
    for start in range(0, len(source), _AT_ONCE):
        indices = np.arange(start, min(start + _AT_ONCE, len(source)), dtype=np.int64)
        data = source.read(indices)
        for index, record in zip(indices.tolist(), data if isinstance(data, list) else unstack(data, len(indices)), strict=True):
            lengths[index] = _length(index, record, name)
    return lengths


def _length(index: int, record: Any, name: str) -> int:
    if isinstance(record, dict) and name in record:
        leaf = record[name]  # also a list of numbers, which JAX takes for a container
    else:
        leaves = dict(leaves_with_names(record))
        if name not in leaves:
            raise ValueError(f"batch_by_length={name!r}: record {index} has no leaf of that name; it has {list(leaves)}")
        leaf = leaves[name]
    try:
        return len(leaf)
    except TypeError:
        raise ValueError(
            f"batch_by_length={name!r}: this leaf of record {index} is {type(leaf).__name__}, without a length"
        ) from None
