"""Match trees of arrays with the arguments of a planned step.

In: the leaves of a plan, and a tree. Out: the leaves of the argument that the tree stands for, or the arguments that are the
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from penstock.shard.record import LeafLayout
from penstock.shard.trace.step import Leaf, tree_leaves


def find_argument(inputs: Sequence[LeafLayout], tree: Any, name: str | None = None) -> list[LeafLayout]:
    """Return the leaves of the argument that has the structure, shapes and dtypes of a tree.

    Args:
      inputs: the leaves of all arguments of the step.
      tree: a pytree of arrays.
      name: the name of the argument, if several have the same structure and different layouts.

    Raises:
      TypeError: a leaf of the tree is not an array.
      ValueError: no argument has this structure; the message says what differs from the nearest. Or several have it, with
        different layouts, and no name is given.
    """
    leaves = tree_leaves(tree)
    arguments: dict[str, list[LeafLayout]] = {}
    for leaf in inputs:
        arguments.setdefault(leaf.path.partition("/")[0], []).append(leaf)
    if name is not None and name not in arguments:
        raise ValueError(f"the step has no argument {name!r}; its arguments are {', '.join(map(repr, arguments))}")
    nearest, most_alike = "", (-1, -1, -1)
    found: dict[str, list[LeafLayout]] = {}
    for each_name, planned in arguments.items():
        if name not in (None, each_name):
            continue
        alike = _likeness(planned, leaves)
        if len(planned) == len(leaves) == alike[0]:
            found[each_name] = planned
        elif alike > most_alike:
            nearest, most_alike = _first_difference(each_name, planned, leaves), alike
    if not found:
        raise ValueError(f"no argument of the step has this structure; {nearest}")
    if len({tuple(leaf.stored for leaf in planned) for planned in found.values()}) > 1:
        raise ValueError(
            f"{' and '.join(map(repr, found))} have this structure, and are laid out differently; "
            f"say which it is: argument={next(iter(found))!r}"
        )
    return next(iter(found.values()))


def select_batch(inputs: Sequence[LeafLayout], tree: Any, shardings: Sequence[Any]) -> Any:
    """Return the shardings of the argument that is the batch, or a tuple of them if several are.

    An argument is a batch if some of its leaves have that role, and none is a parameter or belongs to the optimizer.

    Args:
      inputs: the leaves of all arguments of the step.
      tree: the structure of the arguments.
      shardings: the sharding of each leaf.

    Raises:
      ValueError: no argument is a batch.
    """
    arguments = jax.tree_util.tree_unflatten(tree, shardings)
    roles = [set(jax.tree_util.tree_leaves(each)) for each in jax.tree_util.tree_unflatten(tree, [leaf.role for leaf in inputs])]
    batches = [
        argument
        for argument, of_leaves in zip(arguments, roles, strict=True)
        if "batch" in of_leaves and not of_leaves & {"parameters", "optimizer"}
    ]
    if not batches:
        raise ValueError(
            "no argument of the step is a batch, judging by its use in the step: take one of plan.shardings, or name it when "
            "planning, roles={'batch/*': 'batch'}"
        )
    return batches[0] if len(batches) == 1 else tuple(batches)


def _likeness(planned: Sequence[LeafLayout], leaves: Sequence[Leaf]) -> tuple[int, int, int]:
    """Return how many leaves of an argument equal those of a tree, how many have their paths, and how many their shapes."""
    pairs = list(zip(planned, leaves, strict=False))
    return (
        sum(_path(leaf) == given.path and _type(leaf) == _type(given) for leaf, given in pairs),
        sum(_path(leaf) == given.path for leaf, given in pairs),
        sum(leaf.shape == given.shape for leaf, given in pairs),
    )


def _first_difference(name: str, planned: Sequence[LeafLayout], leaves: Sequence[Leaf]) -> str:
    """Describe the first leaf in which an argument of the plan differs from a tree."""
    for leaf, given in zip(planned, leaves, strict=False):
        if _path(leaf) != given.path:
            return f"the nearest is {name!r}, which has a leaf {_path(leaf)!r} where this has {given.path!r}"
        if _type(leaf) != _type(given):
            return f"the nearest is {name!r}, where {_path(leaf)!r} is {_type(leaf)}, and here it is {_type(given)}"
    return f"the nearest is {name!r}, which has {len(planned)} leaves where this has {len(leaves)}"


def _path(leaf: LeafLayout) -> str:
    """Return the path of a leaf without the name of its argument."""
    return leaf.path.partition("/")[2]


def _type(leaf: Leaf | LeafLayout) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
