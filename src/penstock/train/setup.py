"""Prepare a training: a step, a state and a first batch go in; the state in its place and a jitted program come out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from penstock.data.tree import Batch, leaves_with_names
from penstock.shard import Plan
from penstock.shard.arguments import put_copy
from penstock.train.leaves import named_leaves


def check_state(state: Any) -> None:
    """Check that all leaves of a state are arrays or numbers.

    Raises:
      TypeError: a leaf is neither. The message names it.
      ValueError: there is no leaf, or an array was donated or deleted.
    """
    leaves = named_leaves(state)
    if not leaves:
        raise ValueError("the state has no arrays: a step could not change it")
    for name, leaf in leaves.items():
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                f"leaf {name!r} of the state was deleted: a step has donated it. Use the state that was returned, or "
                "give a function that makes a new one"
            )
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)) or _is_foreign(leaf):
            kind = f"array of {leaf.dtype}" if hasattr(leaf, "dtype") else type(leaf).__name__
            raise TypeError(
                f"leaf {name!r} of the state is a {kind}, and not an array of numbers: keep functions and settings out of "
                "the state, for example with nnx.split, or with eqx.partition(module, eqx.is_array)"
            )


def _is_foreign(leaf: Any) -> bool:
    """Return whether a NumPy array has a dtype that JAX does not have, as those of texts, dates and objects."""
    if isinstance(leaf, jax.Array) or not hasattr(leaf, "dtype"):
        return False
    return not (jnp.issubdtype(leaf.dtype, np.number) or jnp.issubdtype(leaf.dtype, np.bool_))


def check_devices_of_state(state: Any, batch: Batch) -> None:
    """Check that arrays which the caller has put on certain devices are on those of the batches.

    Raises:
      ValueError: they are on others. A program runs on one set of devices.
    """
    devices = leaves_with_names(batch)[0][1].sharding.device_set
    for name, leaf in named_leaves(state).items():
        if not isinstance(leaf, jax.Array) or not leaf.committed:
            continue
        own = leaf.sharding.device_set
        # An array on one device is replicated over the devices of the batches, if those are several.
        if own != devices and (len(own) > 1 or len(devices) == 1):
            raise ValueError(
                f"leaf {name!r} of the state is on {_devices(own)}, and the batches are on {_devices(devices)}: put them on the "
                "devices of the state, with feed=ps.feed(batches, to=sharding)"
            )


def _devices(devices: set[jax.Device]) -> str:
    return str(next(iter(devices))) if len(devices) == 1 else f"{len(devices)} devices"


def shardings_of_state(state: Any, batch: Batch, plan: Plan | None) -> Any:
    """Return the sharding of each leaf of the state, as a tree like it.

    Args:
      state: arrays, numbers, or abstract arrays.
      batch: the first batch, on its devices.
      plan: decides, if there is one. Without one, an array over several devices stays where it is. Any other leaf goes to the
        devices of the batch, replicated.
    """
    if plan is not None:
        return plan.shardings[0]
    everywhere = replicated_over(batch)

    def sharding(leaf: Any) -> Sharding:
        own = getattr(leaf, "sharding", None)
        if isinstance(own, Sharding) and len(own.device_set) > 1:
            return own
        if isinstance(leaf, jax.Array) and leaf.committed and own is not None and len(everywhere.device_set) == 1:
            return own
        return everywhere

    return jax.tree.map(sharding, state)


def replicated_over(batch: Batch) -> Sharding:
    """Return the sharding that replicates an array over the devices of a batch."""
    for _, leaf in leaves_with_names(batch):
        if isinstance(leaf.sharding, NamedSharding):
            return NamedSharding(leaf.sharding.mesh, PartitionSpec())
    return leaves_with_names(batch)[0][1].sharding


def place(state: Any, shardings: Any, like: Any) -> Any:
    """Copy a state to its devices, as arrays of the exact dtypes that a step returns, so that it is compiled only once.

    The copy shares no memory with the state of the caller, as a step donates it.

    Args:
      state: arrays or numbers.
      shardings: the sharding of each leaf.
      like: abstract arrays with the dtypes.

    Raises:
      ValueError: a dtype cannot hold a number. JAX makes 32 bits of 64.
    """
    for (name, leaf), wanted in zip(named_leaves(state).items(), jax.tree.leaves(like), strict=True):
        _check_range(name, leaf, wanted.dtype)

    def exact(leaf: Any, wanted: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return np.asarray(leaf, wanted.dtype)
        return strong(leaf)

    return jax.tree.map(_put, jax.tree.map(exact, state, like), shardings)


def _check_range(name: str, leaf: Any, dtype: Any) -> None:
    """Raise ValueError if a dtype cannot hold the numbers of a leaf. NumPy would wrap integers, and make floats infinite."""
    if isinstance(leaf, jax.Array) or np.asarray(leaf).dtype == dtype:
        return
    given = np.asarray(leaf)
    with np.errstate(over="ignore"):
        held = given.astype(dtype)
    lost = held != given if np.issubdtype(given.dtype, np.integer) else np.isinf(held) & np.isfinite(given)
    if np.any(lost):
        raise ValueError(
            f"leaf {name!r} of the state has {given[lost].ravel()[0]!s}, which {dtype} cannot hold: JAX makes {dtype} of "
            f"{given.dtype}, unless jax_enable_x64 is set"
        )


def strong(leaf: Any) -> Any:
    """Return an array of a strong type, for a number or an array of a weak type; any other array as it is."""
    is_strong = hasattr(leaf, "dtype") and not getattr(leaf, "weak_type", False)
    return leaf if is_strong else jnp.asarray(leaf, jnp.result_type(leaf))


def _put(leaf: Any, sharding: Sharding) -> jax.Array:
    """Copy an array to devices, also to those of other processes, which each have all of it."""
    if sharding.is_fully_addressable or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        return put_copy(leaf, sharding)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = np.array(jax.random.key_data(leaf))
        placed = jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(leaf))
    host = np.array(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def abstract(tree: Any, shardings: Any = None) -> Any:
    """Return the shapes and dtypes of a tree, with the given shardings or those of its arrays."""
    if shardings is None:
        return jax.tree.map(lambda x: _abstract(x, getattr(x, "sharding", None)), tree)
    return jax.tree.map(_abstract, tree, shardings)


def _abstract(x: Any, sharding: Sharding | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(x), getattr(x, "dtype", None) or jnp.result_type(x), sharding=sharding)
