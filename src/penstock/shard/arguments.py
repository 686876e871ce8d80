"""Find which argument of a planned step a tree of arrays is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from penstock.shard.record import LeafLayout
from penstock.shard.trace.step import as_array, canonical_dtype, leaf_paths


def find_argument(inputs: Sequence[LeafLayout], tree: Any, name: str | None = None) -> list[LeafLayout]:
    """Return the leaves of the argument that has the structure, shapes and dtypes of a tree.

    Args:
      inputs: leaves of all arguments of the step.
      tree: a pytree of arrays.
      name: of the argument, where several have that structure and differ in layout.

    Raises:
      ValueError: no argument has this structure; the message says what differs from the nearest. Or several have it, with
        different layouts.
    """
    flat = jax.tree_util.tree_leaves(tree)
    leaves, paths = [as_array(each) for each in flat], leaf_paths(tree)
    arguments: dict[str, list[LeafLayout]] = {}
    for leaf in inputs:
        arguments.setdefault(leaf.path.partition("/")[0], []).append(leaf)
    if name is not None and name not in arguments:
        raise ValueError(f"the step has no argument {name!r}; its arguments are {', '.join(map(repr, arguments))}")
    nearest, most_equal = "", -1
    found: dict[str, list[LeafLayout]] = {}
    for each_name, planned in arguments.items():
        if name not in (None, each_name):
            continue
        equal = [_equal(leaf, path, array) for leaf, path, array in zip(planned, paths, leaves, strict=False)]
        if len(planned) == len(leaves) and all(equal):
            found[each_name] = planned
        elif sum(equal) > most_equal:
            nearest, most_equal = _first_difference(each_name, planned, paths, leaves), sum(equal)
    if not found:
        raise ValueError(f"no argument of the step has this structure; {nearest}")
    if len({tuple(leaf.stored for leaf in planned) for planned in found.values()}) > 1:
        raise ValueError(
            f"{' and '.join(map(repr, found))} have this structure, and are laid out differently; "
            f"say which it is: argument={next(iter(found))!r}"
        )
    return next(iter(found.values()))


def _equal(leaf: LeafLayout, path: str, array: Any) -> bool:
    """Return whether a leaf of the plan has the path, shape and dtype of an array."""
    return (leaf.path.partition("/")[2], leaf.shape, leaf.dtype) == (path, tuple(array.shape), str(canonical_dtype(array)))


def _first_difference(name: str, planned: list[LeafLayout], paths: list[str], leaves: list[Any]) -> str:
    """Describe the first leaf in which an argument of the plan differs from the arrays given."""
    for leaf, path, array in zip(planned, paths, leaves, strict=False):
        here = leaf.path.partition("/")[2]
        if here != path:
            return f"the nearest is {name!r}, which has a leaf {here!r} where this has {path!r}"
        if not _equal(leaf, path, array):
            return (
                f"the nearest is {name!r}, where {here!r} is {leaf.dtype}{list(leaf.shape)}, "
                f"and here it is {canonical_dtype(array)}{list(array.shape)}"
            )
    return f"the nearest is {name!r}, which has {len(planned)} leaves where this has {len(leaves)}"
