"""Handle batches, which are pytrees of arrays [B, ...]: name and describe their leaves, convert them to NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Batch = Any  # a pytree of arrays [B, ...]
Record = Any  # a pytree with the values of one record


def leaves_with_names(tree: Any) -> list[tuple[str, Any]]:
    """Return the leaves with readable paths, as `("image", …)` and `("inputs/0", …)`. A single leaf is named "batch"."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(leaf_name(path), leaf) for path, leaf in paths]


def check_keys(tree: Any) -> None:
    """Raise TypeError if a dict has keys that JAX cannot sort."""
    try:
        jax.tree_util.tree_structure(tree)
    except ValueError as error:
        raise TypeError(f"a dict has keys of different types, which JAX cannot sort: make them all strings ({error})") from error


def leaf_name(path: Sequence[Any]) -> str:
    """Return the path of a leaf as a name such as "inputs/0"; "batch" for an empty path."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/") or "batch"


def describe_array(x: Any) -> str:
    """Describe dtype and shape, as `uint8[128,28,28,1]`."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def describe(tree: Any) -> str:
    """Describe all leaves, as `image: uint8[128,28,28,1], label: int32[128]`."""
    return ", ".join(
        f"{name}: {describe_array(leaf) if hasattr(leaf, 'dtype') else type(leaf).__name__}"
        for name, leaf in leaves_with_names(tree)
    )


def as_records(data: Batch | list[Record], records: int) -> list[Record]:
    """Split a batch into its records, which are views. Return a list of records as it is."""
    if isinstance(data, list):
        return data
    leaves, treedef = jax.tree_util.tree_flatten(data)
    return [jax.tree_util.tree_unflatten(treedef, [leaf[i] for leaf in leaves]) for i in range(records)]


def to_numpy(leaf: Any) -> Any:
    """Convert a leaf to a NumPy array, without a copy of the memory of torch and TensorFlow tensors.

    NumPy and JAX arrays are returned as they are. A masked array is refused, as its mask would be lost.
    """
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError("a masked array, whose mask a batch would lose: make an array of it with .filled(value)")
    if isinstance(leaf, (np.ndarray, jax.Array)):
        return leaf
    if type(leaf).__module__.partition(".")[0] == "torch":
        return _from_torch(leaf)
    return np.asarray(leaf)


def _from_torch(tensor: Any) -> np.ndarray:
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":  # NumPy has no such dtype, but ml_dtypes does
        import ml_dtypes
        import torch

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def is_numeric(dtype: Any) -> bool:
    """Return whether a device can hold a dtype: bool, integers, floats (also bfloat16 and others), complex, PRNG keys."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return True
    dtype = np.dtype(dtype)
    return dtype.kind in "biufc" or dtype.type.__module__ == "ml_dtypes"
