"""Make a batch, a pytree with leaves [B, ...], of a list of records: `stack`, and `pad_to` for different lengths."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penstock.data.tree import Batch, Record, check_keys, is_key, is_list_of_numbers, is_sparse, leaf_name, to_numpy


def stack(records: Sequence[Record]) -> Batch:
    """Stack the leaves of records with the same structure along a new first dimension.

    Args:
      records: pytrees. Leaves may be NumPy, JAX or torch arrays, numbers, lists of numbers, images (anything that `np.asarray`
        takes), strings or bytes.

    Returns:
      A pytree of NumPy arrays [B, ...]. Strings and bytes give an array of dtype object.

    Raises:
      ValueError: the records differ in structure, or in the shape of a leaf.

    Examples:
      >>> stack([{"x": 1, "y": [1, 2]}, {"x": 2, "y": [3, 4]}])
      {'x': array([1, 2]), 'y': array([[1, 2],
             [3, 4]])}
    """
    paths, columns, treedef = _columns(records)
    leaves = [_stack_leaf(leaf_name(path), column) for path, column in zip(paths, columns, strict=True)]
    return jax.tree_util.tree_unflatten(treedef, leaves)


class pad_to:  # noqa: N801 - used like a function: collate=ps.pad_to([128, 256])
    """A `collate` function that pads records to the smallest of a few lengths, so that few shapes are compiled.

    Args:
      lengths: bucket lengths for every leaf that has a dimension; or a dict from leaf name (`"tokens"`, `"inputs/ids"`) to
        bucket lengths, for these leaves only. Leaves with the same bucket lengths are padded to the same length: the smallest
        one that holds the longest record of the batch.
      value: the padding value. The dtype of each padded leaf must be able to represent it.
      mask: name of a boolean leaf [B, L] that is added to the dict batch. It is true where the first padded leaf has data.

    Returns:
      A function from a list of records to a batch with leaves [B, L, ...]. Leaves that are not padded are stacked.

    Raises:
      ValueError: at once, if a length is not a positive integer. When called, if a record is longer than the largest length,
        or if the dtype of a leaf cannot represent `value`.

    Examples:
      >>> collate = ps.pad_to([4, 8], mask="mask")
      >>> batch = collate([{"tokens": np.arange(3)}, {"tokens": np.arange(5)}])
      >>> batch["tokens"].shape, batch["mask"].sum(axis=1).tolist()
      ((2, 8), [3, 5])
    """

    def __init__(self, lengths: Sequence[int] | Mapping[str, Sequence[int]], *, value: float = 0, mask: str | None = None):
        given = lengths if isinstance(lengths, Mapping) else {"": lengths}
        self.lengths = {name: _buckets(name, buckets) for name, buckets in given.items()}
        self._value = value
        self._mask = mask

    @property
    def has_choice(self) -> bool:
        """Tell whether the padded length depends on the records."""
        return any(len(buckets) > 1 for buckets in self.lengths.values())

    def __call__(self, records: Sequence[Record], longest: int | None = None) -> Batch:
        """Pad and stack the records. See the class.

        Args:
          longest: the largest length in the global batch, where that is known, so that all processes choose the same length;
            None for the largest length of `records`.

        Raises:
          ValueError: a record is longer than `longest`.
        """
        paths, columns, treedef = _columns(records)
        names = [leaf_name(path) for path in paths]
        if unknown := [name for name in self.lengths if name and name not in names]:
            raise ValueError(f"pad_to names leaf {unknown[0]!r}; the records have {names}")
        padded = [self._buckets_of(name, column[0]) for name, column in zip(names, columns, strict=True)]
        arrays = [
            [_array(name, leaf) for leaf in column] if buckets else column
            for name, column, buckets in zip(names, columns, padded, strict=True)
        ]
        needed: dict[tuple[int, ...], int] = {}
        for name, column, buckets in zip(names, arrays, padded, strict=True):
            if buckets:
                needed[buckets] = max(needed.get(buckets, 0), _longest(name, column, buckets, longest))
        leaves, mask = [], None
        for name, column, buckets in zip(names, arrays, padded, strict=True):
            if not buckets:
                leaves.append(_stack_leaf(name, column))
                continue
            length = buckets[bisect.bisect_left(buckets, needed[buckets])]
            leaves.append(_pad(name, column, length, self._value))
            if mask is None:
                mask = np.arange(length) < np.array([len(x) for x in column])[:, None]
        batch = jax.tree_util.tree_unflatten(treedef, leaves)
        return batch if self._mask is None else add_mask(batch, self._mask, mask, f"pad_to(mask={self._mask!r})")

    def _buckets_of(self, name: str, first: Any) -> tuple[int, ...] | None:
        if "" in self.lengths:
            return self.lengths[""] if not isinstance(first, (str, bytes)) and _array(name, first).ndim else None
        return self.lengths.get(name)


MASK = "mask"
"""The leaf that a Loader with remainder="pad" adds to each batch."""


def add_mask(batch: Batch, name: str, mask: Any, why: str) -> dict[str, Any]:
    """Return a dict batch with one more leaf. `why` names the option that asked for the leaf, for errors."""
    if not isinstance(batch, dict):
        raise ValueError(f"{why} adds a leaf {name!r} to a dict batch; this batch is a {type(batch).__name__}")
    if name in batch:
        raise ValueError(f"{why} adds a leaf {name!r}, but the batch has one already: rename it")
    return {**batch, name: mask}


def _columns(records: Sequence[Record]) -> tuple[list[Any], list[list[Any]], Any]:
    """Return the paths of the leaves, for each path the leaves of all records, and the structure of the records."""
    check_keys(records[0])
    first: tuple[list[Any], Any] = jax.tree_util.tree_flatten_with_path(records[0], _is_leaf)
    paths, treedef = first
    rows = []
    for i, record in enumerate(records):
        leaves, structure = jax.tree_util.tree_flatten(record, _is_leaf)
        if structure != treedef:
            raise ValueError(
                f"records of one batch differ in structure: row 0 is {treedef}, row {i} is {structure}; "
                "make them alike in transform=ps.per_record(fn), with an array for what varies in length"
            )
        rows.append(leaves)
    return [path for path, _ in paths], [list(column) for column in zip(*rows, strict=True)], treedef


def _is_leaf(node: Any) -> bool:
    return is_list_of_numbers(node) or is_sparse(node)


def _array(name: str, leaf: Any) -> np.ndarray:
    try:
        return np.asarray(to_numpy(leaf))
    except (TypeError, ValueError) as error:
        raise type(error)(f"leaf {name!r} of one record makes no array: {error}") from error


def _stack_leaf(name: str, column: Sequence[Any]) -> np.ndarray | jax.Array:
    if isinstance(column[0], (str, bytes)):
        return np.array(column, dtype=object)
    if is_key(column[0]):
        return jnp.stack(column)
    arrays = [_array(name, leaf) for leaf in column]
    shapes = {x.shape for x in arrays}
    if len(shapes) > 1:
        listed = ", ".join(map(str, sorted(shapes)[:4]))
        raise ValueError(
            f"leaf {name!r} differs in shape between the records of one batch ({listed}): pad it with "
            "collate=ps.pad_to(lengths), or crop it in transform=ps.per_record(fn)"
        )
    return np.stack(arrays)


def _buckets(name: str, lengths: Sequence[int]) -> tuple[int, ...]:
    given = list(lengths) if isinstance(lengths, Iterable) else []
    if not given or any(not isinstance(n, (int, np.integer)) or n < 1 for n in given):
        where = f" for leaf {name!r}" if name else ""
        raise ValueError(f"pad_to needs positive lengths in a list, such as [128, 256], got {lengths!r}{where}")
    return tuple(sorted(set(given)))


def _longest(name: str, column: Sequence[np.ndarray], buckets: tuple[int, ...], known: int | None) -> int:
    if not all(x.ndim for x in column):
        raise ValueError(f"leaf {name!r} is a scalar in one record, and pad_to pads the first dimension: give it no lengths")
    longest = max(len(x) for x in column)
    if known is not None and longest > known:
        raise ValueError(
            f"leaf {name!r} of one record has length {longest}, and batch_by_length has at most {known} for this batch: give the "
            "lengths of the records as they are padded, after the transform"
        )
    longest = longest if known is None else known
    if longest > buckets[-1]:
        raise ValueError(
            f"leaf {name!r} of one record has length {longest}, more than the largest of pad_to's lengths {list(buckets)}: "
            "add a larger one, or cut the record in transform=ps.per_record(fn)"
        )
    return longest


def _pad(name: str, column: Sequence[np.ndarray], length: int, value: float) -> np.ndarray:
    filled = [x for x in column if len(x)] or column  # an empty list has no known dtype and no known further dimensions
    tails = {x.shape[1:] for x in filled}
    if len(tails) > 1:
        raise ValueError(f"leaf {name!r} differs in more than its first dimension: {sorted(tails)[:4]}; pad_to pads the first")
    dtype = np.result_type(*{x.dtype for x in filled})
    out = np.full((len(column), length, *filled[0].shape[1:]), _padding(name, value, dtype), dtype)
    for row, x in zip(out, column, strict=True):
        if len(x):
            row[: len(x)] = x
    return out


def _padding(name: str, value: float, dtype: np.dtype) -> np.ndarray:
    """Return the padding value in the dtype of a leaf. It may be rounded to the precision of a float, and no further."""
    try:
        with np.errstate(all="ignore"):
            padding = np.array(value).astype(dtype)
        same = np.isfinite(padding) == np.isfinite(value) if jnp.issubdtype(dtype, np.inexact) else padding == value
    except (TypeError, ValueError, OverflowError):
        same = False
    if not same:
        raise ValueError(f"leaf {name!r} has dtype {dtype}, which cannot hold pad_to's value={value!r}: give another value")
    return padding
