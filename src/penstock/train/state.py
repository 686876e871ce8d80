"""Check a state and place it on the devices, and turn it into named arrays that can be stored, and back.

The name of a leaf is its path, such as "parameters/w". Typed PRNG keys are stored as their integers, and arrays of a dtype that
TensorStore lacks as a wider one that holds the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from penstock.data.tree import Batch, describe_array, leaf_name, leaves_with_names
from penstock.errors import OtherStateError
from penstock.shard import Plan
from penstock.shard.arguments import put_copy


def check_state(state: Any) -> None:
    """Check the state that a caller gives.

    Raises:
      TypeError: a leaf is neither an array nor a number.
      ValueError: there is no leaf, an array was donated, or JAX cannot hold a number.
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
    check_range(state)


def check_range(state: Any) -> None:
    """Raise ValueError if JAX cannot hold a number of a state. NumPy would wrap integers, and make floats infinite."""
    for name, leaf in named_leaves(state).items():
        if isinstance(leaf, jax.Array):
            continue
        given, dtype = np.asarray(leaf), jnp.result_type(leaf)
        if given.dtype == dtype:
            continue
        remedy = f"JAX makes {dtype} of {given.dtype}, unless jax_enable_x64 is set"
        if given.dtype == object:  # a Python number of more than 64 bits
            given, lost, remedy = given[None], np.array([True]), "give a float, or a number of at most 64 bits"
        else:
            with np.errstate(over="ignore"):
                held = given.astype(dtype)
            lost = held != given if np.issubdtype(given.dtype, np.integer) else np.isinf(held) & np.isfinite(given)
        if np.any(lost):
            raise ValueError(f"leaf {name!r} of the state has {given[lost].ravel()[0]!s}, which {dtype} cannot hold: {remedy}")


def _is_foreign(leaf: Any) -> bool:
    """Return whether a NumPy array has a dtype that JAX lacks, such as texts, dates and objects."""
    if isinstance(leaf, jax.Array) or not hasattr(leaf, "dtype"):
        return False
    return not (jnp.issubdtype(leaf.dtype, np.number) or jnp.issubdtype(leaf.dtype, np.bool_))


def check_devices_of_state(state: Any, batch: Batch) -> None:
    """Raise ValueError if an array is committed to other devices than the batches. A program runs on one set of devices."""
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
      plan: decides, if there is one. Without one, an array over several devices stays where it is. Any other leaf is replicated
        over the devices of the batch.
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
      like: abstract arrays.
    """

    def exact(leaf: Any, wanted: Any) -> Any:
        return strong(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf, wanted.dtype)

    return jax.tree.map(_put, jax.tree.map(exact, state, like), shardings)


def strong(leaf: Any) -> Any:
    """Return an array of a strong type, for a number or an array of a weak type; any other array as it is."""
    is_strong = hasattr(leaf, "dtype") and not getattr(leaf, "weak_type", False)
    return leaf if is_strong else jnp.asarray(leaf, jnp.result_type(leaf))


def _put(leaf: Any, sharding: Sharding) -> jax.Array:
    """Copy an array to devices, also to devices of other processes, which each have all of it."""
    if sharding.is_fully_addressable or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        return put_copy(leaf, sharding)
    if _is_key(leaf):
        data = np.array(jax.random.key_data(leaf))
        placed = jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(leaf))
    host = np.array(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def abstract(tree: Any, shardings: Any = None) -> Any:
    """Return the shapes and dtypes of a tree, with the given shardings, or the shardings of its arrays."""

    def describe(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(x), getattr(x, "dtype", None) or jnp.result_type(x), sharding=sharding)

    if shardings is None:
        return jax.tree.map(lambda x: describe(x, getattr(x, "sharding", None)), tree)
    return jax.tree.map(describe, tree, shardings)


# The names of the leaves, and the arrays that are stored for them.
_MOST = 20  # lines of a list of differences
_WIDER = {"uint2": jnp.uint8, "uint4": jnp.uint8, "float8_e4m3": jnp.float16}  # for what TensorStore 0.1.86 lacks


class Leaf(NamedTuple):
    """The description of a leaf, which a stored array needs to take its place."""

    shape: tuple[int, ...]  # of typed PRNG keys, without the dimension of their integers
    dtype: str  # its name; of typed PRNG keys "key<…>", which names their implementation

    def __str__(self) -> str:
        return describe_array(self)


def named_leaves(state: Any) -> dict[str, Any]:
    """Return the leaves of a state by name; raise ValueError if two have the same, as in {"a/b": …, "a": {"b": …}}."""
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    named: dict[str, Any] = {}
    for path, leaf in paths:
        name = leaf_name(path) if path else "state"
        if name in named:
            raise ValueError(f"the state has two leaves named {name!r}: a key of a dict must not have the path of another leaf")
        named[name] = leaf
    return named


def describe_leaves(named: Mapping[str, Any]) -> dict[str, Leaf]:
    """Describe arrays, or abstract arrays, by name."""
    return {name: Leaf(tuple(x.shape), str(x.dtype)) for name, x in named.items()}


def check_same_leaves(stored: Mapping[str, Leaf], wanted: Mapping[str, Leaf], where: str) -> None:
    """Compare the stored leaves of a checkpoint with the wanted leaves of a state. `where` names the checkpoint.

    Raises:
      OtherStateError: they differ. The message lists both, leaf by leaf.
    """
    names = [name for name in {**wanted, **stored} if stored.get(name) != wanted.get(name)]
    if not names:
        return
    width = max(len(name) for name in names[:_MOST])
    rows = [f"  {name:{width}}  {stored.get(name, 'not there')!s:>20}  {wanted.get(name, 'not there')!s:>20}" for name in names]
    more = f"\n  … and {len(rows) - _MOST:,} more" if len(rows) > _MOST else ""
    raise OtherStateError(
        f"{where} belongs to another model: {len(names):,} of {len({**wanted, **stored}):,} leaves differ\n"
        f"  {'leaf':{width}}  {'in the checkpoint':>20}  {'in this state':>20}\n" + "\n".join(rows[:_MOST]) + more + "\n"
        "Train the model that was saved, or name another folder for this one"
    )


def storable(array: Any) -> Any:
    """Return an array that a file can hold: the integers of typed PRNG keys, and nearly any other array as it is."""
    if _is_key(array):
        return jax.random.key_data(array)
    wider = _WIDER.get(str(array.dtype))
    return array if wider is None else array.astype(wider)


def storable_like(like: Any) -> jax.ShapeDtypeStruct:
    """Return the abstract array, with its sharding, that is stored for an array or an abstract array."""
    if not _is_key(like):
        return jax.ShapeDtypeStruct(like.shape, _WIDER.get(str(like.dtype), like.dtype), sharding=like.sharding)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(like.shape, like.dtype))
    # The sharding of the keys leaves the last dimension, the integers of a key, replicated.
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=like.sharding)


def restored(array: Any, like: Any) -> Any:
    """Turn a stored array into the leaf that it was: the reverse of `storable`."""
    if not _is_key(like):
        return array if array.dtype == like.dtype else array.astype(like.dtype)
    return jax.device_put(jax.random.wrap_key_data(array, impl=_implementation(like.dtype)), like.sharding)


def empty(like: Any) -> jax.Array:
    """Return an array without elements, or keys."""
    if not _is_key(like):
        return jnp.zeros(like.shape, like.dtype, device=like.sharding)
    data = storable_like(like)
    return restored(jnp.zeros(data.shape, data.dtype, device=data.sharding), like)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _implementation(dtype: Any) -> str:
    """Return the name of the implementation of typed PRNG keys."""
    for name in ("threefry2x32", "rbg", "unsafe_rbg"):
        if jax.random.key(0, impl=name).dtype == dtype:
            return name
    raise ValueError(f"keys of {dtype} cannot be restored: keep their integers, jax.random.key_data(keys), in the state")
