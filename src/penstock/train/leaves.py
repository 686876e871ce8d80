"""The leaves of a state, by name: a pytree goes in, a flat dict of arrays that can be stored comes out, and back.

The names are paths such as "parameters/w". Typed PRNG keys are stored as their integers, and arrays of a dtype that TensorStore
lacks as a wider one that holds the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from penstock.data.tree import leaf_name

_MOST = 20  # lines of a list of differences
_WIDER = {"uint2": jnp.uint8, "uint4": jnp.uint8, "float8_e4m3": jnp.float16}  # for what TensorStore 0.1.86 lacks


class Leaf(NamedTuple):
    """The description of a leaf: what has to be equal for a stored array to take its place.

    Attributes:
      shape: of the array; of a typed PRNG key without the integers of each key.
      dtype: the name of the dtype; of typed PRNG keys "key<…>", which names their implementation.
    """

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class OtherStateError(ValueError):
    """The error raised if a checkpoint does not hold the state of this model. Its message lists the leaves that differ."""


def named_leaves(state: Any) -> dict[str, Any]:
    """Return the leaves of a state by name, in the order of the tree.

    Raises:
      ValueError: two leaves have the same name, as those of {"a/b": …} and {"a": {"b": …}}.
    """
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
    # The sharding of the keys leaves the further dimension, that of the integers of a key, replicated.
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


def check_same_leaves(stored: Mapping[str, Leaf], wanted: Mapping[str, Leaf], where: str) -> None:
    """Compare the leaves of a checkpoint with those of a state.

    Args:
      stored: the leaves of the checkpoint.
      wanted: the leaves of the state.
      where: names the checkpoint.

    Raises:
      OtherStateError: they differ. Both sides are listed, leaf by leaf.
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


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _implementation(dtype: Any) -> str:
    """Return the name of the implementation of typed PRNG keys."""
    for name in ("threefry2x32", "rbg", "unsafe_rbg"):
        if jax.random.key(0, impl=name).dtype == dtype:
            return name
    raise ValueError(f"keys of {dtype} cannot be restored: keep their integers, jax.random.key_data(keys), in the state")
