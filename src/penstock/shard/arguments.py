"""Match trees of arrays with the arguments of a planned step, and put them on devices in memory of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from penstock.shard.record import LeafLayout
from penstock.shard.trace.step import Leaf, tree_leaves
from penstock.shard.wording import format_type

_AnyLeaf = TypeVar("_AnyLeaf", Leaf, LeafLayout)


def find_arguments(inputs: Sequence[LeafLayout], tree: Any, name: str | None = None) -> list[LeafLayout]:
    """Return the leaves of the argument that has the structure, shapes and dtypes of a tree.

    A tuple that is no argument stands for several arguments that follow each other.

    Args:
      name: the name of the argument, or of the first one, if several have the same structure and different layouts.

    Raises:
      TypeError: a leaf of the tree is not an array.
      ValueError: no argument has this structure; the message says what differs from the nearest. Or several have it, with
        different layouts, and no name is given.
    """
    leaves = tree_leaves(tree)
    arguments = _by_argument(inputs)
    if name is not None and name not in arguments:
        raise ValueError(f"the step has no argument {name!r}; its arguments are {', '.join(map(repr, arguments))}")
    found = {each: planned for each, planned in arguments.items() if name in (None, each) and _equal(planned, leaves)}
    several = not found and type(tree) is tuple
    if several:
        found = _find_several(arguments, _by_argument(leaves), name)
    if not found:
        raise ValueError(_describe_missing(arguments, leaves, several, name))
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


def _by_argument(leaves: Sequence[_AnyLeaf]) -> dict[str, list[_AnyLeaf]]:
    """Return the leaves of each argument, or of each part of a tuple, without the first key of their paths."""
    parts: dict[str, list[_AnyLeaf]] = {}
    for leaf in leaves:
        first, _, rest = leaf.path.partition("/")
        parts.setdefault(first, []).append(replace(leaf, path=rest))
    return parts


def _find_several(
    arguments: Mapping[str, list[LeafLayout]], parts: Mapping[str, list[Leaf]], name: str | None
) -> dict[str, list[LeafLayout]]:
    """Return the leaves of adjacent arguments that equal the parts of a tuple, by the name of the first argument."""
    found = {}
    names = list(arguments)
    for start in range(len(names) - len(parts) + 1):
        chosen = names[start : start + len(parts)]
        same = all(_equal(arguments[each], part) for each, part in zip(chosen, parts.values(), strict=True))
        if same and name in (None, chosen[0]):
            found[chosen[0]] = [leaf for each in chosen for leaf in arguments[each]]
    return found


def _describe_missing(arguments: Mapping[str, list[LeafLayout]], leaves: Sequence[Leaf], several: bool, name: str | None) -> str:
    """Describe a tree that is no argument, and no tuple of arguments if it may stand for several."""

    def nearest(leaves: Sequence[Leaf], name: str | None) -> str:
        return max((each for each in arguments if name in (None, each)), key=lambda each: _likeness(arguments[each], leaves))

    one = nearest(leaves, name)
    whole = f"no argument of the step has this structure; {_first_difference(one, arguments[one], leaves)}"
    if not several or _likeness(arguments[one], leaves)[1]:
        return whole
    for number, part in _by_argument(leaves).items():
        if not any(_equal(planned, part) for planned in arguments.values()):
            near = nearest(part, None)
            difference = _first_difference(near, arguments[near], part)
            return f"no argument of the step has this structure, or the structure of part {number} of this tuple; {difference}"
    return (
        "no argument of the step has this structure, and the arguments that equal the parts of this tuple do not follow each "
        f"other: the step has {', '.join(map(repr, arguments))}. Give the parts in this order, or each by itself"
    )


def _equal(planned: Sequence[LeafLayout], leaves: Sequence[Leaf]) -> bool:
    """Return whether the leaves of an argument equal the leaves of a tree."""
    return len(planned) == len(leaves) == _likeness(planned, leaves)[0]


def _likeness(planned: Sequence[LeafLayout], leaves: Sequence[Leaf]) -> tuple[int, int, int]:
    """Return how many leaves of an argument have the path and type, the path, and the shape of a tree's leaf."""
    pairs = list(zip(planned, leaves, strict=False))
    return (
        sum(leaf.path == given.path and format_type(leaf) == format_type(given) for leaf, given in pairs),
        sum(leaf.path == given.path for leaf, given in pairs),
        sum(leaf.shape == given.shape for leaf, given in pairs),
    )


def _first_difference(name: str, planned: Sequence[LeafLayout], leaves: Sequence[Leaf]) -> str:
    """Describe the first leaf in which an argument of the plan differs from a tree."""
    for leaf, given in zip(planned, leaves, strict=False):
        if leaf.path != given.path:
            return f"the nearest is {name!r}, which has a leaf {leaf.path!r} where this has {given.path!r}"
        if format_type(leaf) != format_type(given):
            return f"the nearest is {name!r}, where {leaf.path!r} is {format_type(leaf)}, and here it is {format_type(given)}"
    return f"the nearest is {name!r}, which has {len(planned)} leaves where this has {len(leaves)}"


# Put arrays on devices without sharing memory with the caller's arrays.


def put_copy(tree: Any, shardings: Any) -> Any:
    """Put a tree of arrays on devices, as `jax.device_put`, in memory of its own. The shardings are a prefix of the tree.

    `jax.device_put` may return a shard in the memory of its argument: of a `jax.Array` that is there already, or of a NumPy array
    on a CPU. A step that donates the result would then delete the caller's array, and a caller who writes to a NumPy array would
    change the state.
    """
    placed = jax.device_put(tree, shardings, may_alias=False)
    return jax.tree.map(_copied_if_shared, tree, placed)


def _copied_if_shared(given: Any, put: jax.Array) -> jax.Array:
    if not _share_memory(given, put):
        return put
    copied = jnp.copy(put)
    if isinstance(given, np.ndarray):
        copied.block_until_ready()  # JAX copies asynchronously, and the caller may write to the array after this call
    return copied


def _share_memory(given: Any, put: jax.Array) -> bool:
    """Return whether a shard of `put` begins inside of the memory of `given`. JAX may ignore `may_alias=False`."""
    if isinstance(given, np.ndarray):
        first = given.ctypes.data
        return any(first <= pointer < first + max(1, given.nbytes) for pointer in _pointers(put))
    if not isinstance(given, jax.Array):
        return False
    if jnp.issubdtype(given.dtype, jax.dtypes.prng_key):
        given, put = jax.random.key_data(given), jax.random.key_data(put)
    return bool(_pointers(given) & _pointers(put))


def _pointers(array: jax.Array) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
