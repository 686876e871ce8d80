"""The target `to` of a feed: devices, shardings or a plan go in, shardings come out, and checks that batches fit them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from penstock._arguments import brief
from penstock.data.collate import MASK
from penstock.data.order.rows import local_parts
from penstock.data.tree import Batch, leaves_with_names

To = Any  # None, a jax.Device, a Sharding, a pytree of these that is a prefix of the batch, or a Plan


def shardings_of(to: To) -> Any:
    """Replace each device in `to` by a sharding, and a plan by its shardings.

    None becomes `jax.default_device` of the calling thread, if that is set.

    Raises:
      TypeError: `to` is none of these, or holds anything else.
      ValueError: a sharding has no device of this process.
    """
    if to is None:
        to = setting("jax_default_device")
        if not isinstance(to, jax.Device):
            return None
    to = getattr(to, "batch_shardings", to)  # of a Plan
    if isinstance(to, str) or not jax.tree_util.tree_leaves(to):
        raise TypeError(
            f"to={brief(to)} is not a place for a batch: give None, a jax.Device, a Sharding, a pytree of Shardings or a Plan"
        )

    def sharding(leaf: Any) -> Sharding:
        if isinstance(leaf, jax.Device):
            leaf = SingleDeviceSharding(leaf)
        if not isinstance(leaf, Sharding):
            raise TypeError(f"to={brief(to)} holds {brief(leaf)}, which is neither a jax.Device nor a Sharding")
        if not leaf.addressable_devices:
            raise ValueError(
                f"to={brief(to)} has no device of process {jax.process_index()}, so this process cannot put a batch there: give "
                "a sharding over the devices of all processes (jax.devices()); or, for a batch of its own in each process, over "
                "jax.local_devices(); or feed in the processes that have the devices only"
            )
        return leaf

    return jax.tree.map(sharding, to, is_leaf=lambda leaf: leaf is None)


def mask_sharding(to: To, shardings: Any, row_dim: int) -> NamedSharding | None:
    """Return the sharding of the mask of rows, for batches of a plan whose step does not take it.

    A Loader with remainder="pad" adds the mask to its batches.

    Args:
      to: the target of a feed.
      shardings: what `shardings_of` returned for it.
      row_dim: the dimension of the rows in each leaf.

    Returns:
      The sharding of the rows of the leaf that has them in most parts; None if `to` is no plan of a dict batch, or has a mask.
    """
    if not hasattr(to, "batch_shardings") or not isinstance(shardings, dict) or MASK in shardings or not shardings:
        return None
    leaves = jax.tree_util.tree_leaves(shardings)
    finest = max(leaves, key=lambda sharding: math.prod(partitions(sharding)[0][: row_dim + 1]))
    return NamedSharding(finest.mesh, PartitionSpec(*finest.spec[: row_dim + 1]))


def setting(name: str) -> Any:
    """Return a JAX setting of this thread."""
    return getattr(jax.config, name)


def in_default_memory(sharding: Sharding) -> bool:
    """Tell whether a sharding is for the default memory of its devices."""
    device: Any = next(iter(sharding.device_set))
    return sharding.memory_kind in (None, device.default_memory().kind)


def map_prefix(fn: Callable[[Sharding, Any], Any], to: Any, batch: Batch) -> Any:
    """Map `fn(sharding, leaf)` over a batch. `to` is a prefix of the batch."""
    try:
        return jax.tree.map(lambda sharding, part: jax.tree.map(lambda leaf: fn(sharding, leaf), part), to, batch)
    except ValueError:
        raise ValueError(
            f"`to` has the structure {brief(jax.tree_util.tree_structure(to))}, which is not a prefix of the batch's: "
            f"{brief(jax.tree_util.tree_structure(batch))}{_first_difference(to, batch)}"
        ) from None


def _first_difference(to: Any, batch: Batch) -> str:
    """Return a leaf that only one of two trees has, as the end of a sentence; "" if they have leaves of the same names."""
    in_to, in_batch = ([name for name, _ in leaves_with_names(tree)] for tree in (to, batch))
    more = [name for name in in_batch if not any(f"{name}/".startswith(f"{place}/") for place in in_to)]
    less = [name for name in in_to if not any(f"{leaf}/".startswith(f"{name}/") for leaf in in_batch)]
    if more:
        return f"; the batch has {more[0]!r}, which `to` lacks"
    return f"; `to` has {less[0]!r}, which the batch lacks" if less else ""


def partitions(sharding: Sharding) -> tuple[list[int], list[str]]:
    """Return the number of parts of each leading dimension, and a description of the mesh axes that shard it."""
    if not isinstance(sharding, NamedSharding):
        return [], []
    parts, words = [], []
    for axes in sharding.spec:
        names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        parts.append(math.prod(sharding.mesh.shape[name] for name in names))
        words.append("mesh axis " + " × ".join(f"{name!r} (size {sharding.mesh.shape[name]})" for name in names))
    return parts, words


def check_divides(name: str, shape: tuple[int, ...], sharding: Sharding, local: bool) -> None:
    """Raise ValueError if a leaf does not divide over its sharding.

    Args:
      local: whether `shape` is that of the part of this process, rather than that of the global array.
    """
    parts, words = partitions(sharding)
    if local:
        parts = [local_parts(sharding, dimension) for dimension in range(len(parts))]
    if len(parts) > len(shape):
        raise ValueError(
            f"leaf {name!r} has {len(shape)} dimensions, too few for {sharding} of `to`: give `to` as a pytree with a "
            "Sharding for each leaf"
        )
    for dimension, (size, n, axes) in enumerate(zip(shape, parts, words, strict=False)):
        if size % n:
            raise ValueError(
                f"leaf {name!r} of shape {shape} does not divide: dimension {dimension} has size {size}, and {axes} needs "
                f"a multiple of {n}" + ("; use such a batch size, or remainder='drop' or 'pad'" if dimension == 0 else "")
            )
