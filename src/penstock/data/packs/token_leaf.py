"""The leaf of a record that holds its tokens: found by name, or because it is the only 1-D array of numbers.

A record (a pytree) and a name go in; the path of a leaf, or its tokens as an array [T], comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import jax
import numpy as np

from penstock.data.collate import is_list_of_numbers
from penstock.data.tree import Record, describe_array, is_numeric, leaf_name, to_numpy


def find_leaf(record: Record, leaf: str | None) -> tuple[Sequence[Any], str]:
    """Return the path and the name of the leaf of a record that holds its tokens.

    Args:
      record: the first record.
      leaf: the name that was asked for; None for the only leaf that is a 1-D array (or list) of numbers.

    Raises:
      ValueError: there is no such leaf, or there are several candidates.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(record, is_list_of_numbers)
    named = {leaf_name(path): (path, value) for path, value in paths}
    if leaf is None:
        found = {name: each for name, each in named.items() if _may_be_tokens(each[1])} or named
        name, (path, _) = only(found)
        return path, name
    if leaf not in named:
        raise ValueError(no_leaf(leaf, list(named)))
    return named[leaf][0], leaf


def only(leaves: dict[str, Any]) -> tuple[str, Any]:
    """Return the name and the value of the only leaf. Raise ValueError if there are others."""
    if len(leaves) != 1:
        names = ", ".join(map(repr, leaves)) or "none"
        raise ValueError(f"ps.pack: the records have several leaves ({names}): say which one holds the tokens, leaf='name'")
    return next(iter(leaves.items()))


def no_leaf(leaf: str, names: list[str]) -> str:
    """Say that there is no leaf of this name, and which there are."""
    has = "are arrays without names: leave `leaf` out" if names == ["batch"] else f"have {names}"
    return f"ps.pack: the records have no leaf {leaf!r}; they {has}"


def _may_be_tokens(value: Any) -> bool:
    if isinstance(value, (str, bytes)):
        return False
    try:
        array = np.asarray(to_numpy(value))
    except (TypeError, ValueError):
        return False
    return array.ndim == 1 and is_numeric(array.dtype)


_Key = Any


def get_leaf(record: Record, path: Sequence[_Key], name: str, number: int) -> Any:
    """Return the leaf of a record at a path of JAX keys."""
    try:
        return reduce(_step, path, record)
    except (KeyError, IndexError, AttributeError, TypeError):
        raise ValueError(f"ps.pack: record {number} has no leaf {name!r}; the first record has it") from None


def _step(node: Any, key: _Key) -> Any:
    getters: dict[type, Callable[[], Any]] = {
        jax.tree_util.DictKey: lambda: node[key.key],
        jax.tree_util.SequenceKey: lambda: node[key.idx],
        jax.tree_util.GetAttrKey: lambda: getattr(node, key.name),
    }
    return getters[type(key)]()


def as_tokens(value: Any, name: str, number: int) -> np.ndarray:
    """Return the tokens of one record as an array [T]. The map of a memmap is not read.

    Raises:
      ValueError: they are no 1-D array of numbers.
    """
    if type(value) is np.ndarray and value.ndim == 1 and value.dtype.kind in "iuf":
        return value
    if isinstance(value, (str, bytes)):
        raise ValueError(
            f"ps.pack: leaf {name!r} of record {number} is {type(value).__name__}, and not an array of tokens: tokenize it before"
        )
    try:
        tokens = np.asarray(to_numpy(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"ps.pack: leaf {name!r} of record {number} makes no array: {error}") from error
    if tokens.ndim != 1 or not is_numeric(tokens.dtype):
        raise ValueError(
            f"ps.pack: leaf {name!r} of record {number} is {describe_array(tokens)}; it needs one array [T] of numbers"
        )
    return tokens


def common_dtype(dtypes: dict[np.dtype, int]) -> np.dtype:
    """Return the dtype that holds the tokens of all documents.

    Args:
      dtypes: the first document of each dtype.

    Raises:
      ValueError: there is none, or integers would become floats, which do not hold all of them.
    """
    (first, number), *others = dtypes.items() or [(np.dtype(np.int64), 0)]
    common = first
    for dtype, other in others:
        try:
            wider = np.result_type(common, dtype)
        except TypeError:  # NumPy has no dtype for both
            wider = np.dtype(object)
        if wider.kind == "O" or len({each.kind in "iub" for each in (common, dtype, wider)}) > 1:
            raise ValueError(
                f"ps.pack: document {number} has tokens of {first}, and document {other} of {dtype}, which no one dtype holds "
                "without loss: give all documents the same one, for example np.asarray(tokens, np.int32)"
            )
        common = wider
    return common
