"""Put arrays on devices without sharing memory with the caller's arrays.

A tree of arrays and shardings go in, arrays with memory of their own come out. `jax.device_put` may return a shard that is the
memory of its argument: of a `jax.Array` that lies there already, or of a NumPy array on a CPU. A step that donates the result
would then delete the caller's array, and a caller who writes to a NumPy array would change the state.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def put_copy(tree: Any, shardings: Any) -> Any:
    """Put a tree of arrays on devices, as `jax.device_put`, in memory of its own.

    Args:
      tree: arrays on the host or on devices.
      shardings: a prefix of the tree.
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
    """Tell whether a shard of `put` begins inside of the memory of `given`. JAX may ignore `may_alias=False`."""
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
