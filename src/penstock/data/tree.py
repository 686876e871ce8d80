"""Handle batches, which are pytrees of arrays [B, ...]: name and describe their leaves, convert them to NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Batch = Any  # a pytree of arrays [B, ...]
Record = Any  # a pytree with the values of one record


def leaves_with_names(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """Return the leaves with readable paths, as `("image", …)` and `("inputs/0", …)`. A single leaf is named "batch"."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
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
    """Convert a leaf to a NumPy array in native byte order, without a copy of the memory of torch and TensorFlow tensors.

    Other NumPy arrays and JAX arrays are returned as they are. A masked array is refused, as its mask would be lost, and so are
    sparse and ragged arrays.
    """
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError("a masked array, whose mask a batch would lose: make an array of it with .filled(value)")
    if isinstance(leaf, np.ndarray):
        return leaf if leaf.dtype.isnative else leaf.astype(leaf.dtype.newbyteorder("="))
    if isinstance(leaf, jax.Array):
        return leaf
    if remedy := dense_form(leaf):
        raise TypeError(f"a {type(leaf).__name__}, whose rows make no array as they are: give {remedy}")
    try:
        return _from_torch(leaf) if type(leaf).__module__.partition(".")[0] == "torch" else np.asarray(leaf)
    except RuntimeError as error:  # of torch, for a tensor without values
        raise TypeError(f"a {type(leaf).__name__}, which makes no array: {error}") from error


def is_sparse(node: Any) -> bool:
    """Return whether a node is a sparse array of JAX, which JAX takes for a container of its numbers and their indices."""
    return type(node).__module__.startswith("jax.experimental.sparse")


def dense_form(leaf: Any) -> str:
    """Return how to make an array of a sparse or ragged container; "" for any other leaf."""
    package, name = type(leaf).__module__.partition(".")[0], type(leaf).__name__
    if package == "scipy" and hasattr(leaf, "toarray"):
        return "matrix.toarray(); or if that is too large, a source whose read(indices) returns matrix[indices].toarray()"
    if is_sparse(leaf):
        return "array.todense(), and make it sparse in the transform of the feed"
    if package == "tensorflow" and "Ragged" in name:
        return "tensor.to_tensor(), which pads its rows; or a list of its rows as records, with collate=ps.pad_to(...)"
    if package == "tensorflow" and "Sparse" in name:
        return "tf.sparse.to_dense(tensor)"
    if package == "torch" and getattr(leaf, "is_nested", False):
        return "torch.nested.to_padded_tensor(tensor, 0); or tensor.unbind() as records, with collate=ps.pad_to(...)"
    if package == "torch" and str(getattr(leaf, "layout", "torch.strided")) != "torch.strided":
        return "tensor.to_dense()"
    return "tensor.dequantize()" if package == "torch" and getattr(leaf, "is_quantized", False) else ""


def is_list_of_numbers(node: Any) -> bool:
    """Return whether a list (of lists) of numbers stands for one array, and is not a container of leaves."""
    if not isinstance(node, list):
        return False
    kinds = set(map(type, node))
    if list in kinds:
        return len(kinds) == 1 and all(map(is_list_of_numbers, node))
    return all(issubclass(kind, (bool, int, float, complex, np.bool_, np.number)) for kind in kinds)


def is_whole(node: Any) -> bool:
    """Return whether a node of a batch is one array, though JAX takes it for a container.

    It is a list of numbers, some of which may be missing (None), or a sparse array of JAX. An empty list stays a container.
    """
    if isinstance(node, list):
        return any(x is not None for x in node) and is_list_of_numbers([x for x in node if x is not None])
    return is_sparse(node)


def to_arrays(batch: Batch, copy: bool = False) -> Batch:
    """Convert the leaves of a batch to arrays, by `to_numpy`, and each list of numbers to one array.

    Args:
      copy: whether to copy the NumPy arrays, because their memory may be written to again.

    Raises:
      TypeError: a leaf makes no array, or the batch is a table.
      ValueError: the lists in a list of numbers differ in length.
    """
    if not copy and all(type(leaf) is np.ndarray and leaf.dtype.isnative for leaf in jax.tree_util.tree_leaves(batch)):
        return batch
    leaves, structure = jax.tree_util.tree_flatten(batch, is_whole)
    if leaves and leaves[0] is batch and hasattr(batch, "columns"):  # a table of pandas, polars or Arrow
        raise TypeError(
            f"a batch is a {type(batch).__name__}, whose columns one array cannot hold: give a dict with an array for each "
            "column, or feed ps.Loader(table, batch_size)"
        )
    arrays: list[Any] = []
    try:
        for leaf in leaves:
            array = _to_array(leaf)
            arrays.append(array.copy() if copy and isinstance(array, np.ndarray) else array)
    except (TypeError, ValueError) as error:
        name = leaves_with_names(batch, is_whole)[len(arrays)][0]
        raise (TypeError if isinstance(error, TypeError) else ValueError)(f"leaf {name!r} of a batch is {error}") from error
    return jax.tree_util.tree_unflatten(structure, arrays)


def _to_array(leaf: Any) -> Any:
    """Convert one leaf. The message of an error continues "leaf 'x' of a batch is"."""
    if is_sparse(leaf):
        return leaf  # `jax.device_put` takes it
    try:
        array = to_numpy(leaf)
    except ValueError as error:
        if isinstance(leaf, list):
            raise ValueError(
                "a list of lists of different lengths: pad them where the batch is made, or give the records to a Loader or "
                "ps.stream with collate=ps.pad_to(...)"
            ) from error
        raise
    if not isinstance(array, np.ndarray) or array.dtype != object or isinstance(leaf, np.ndarray):
        return array
    if isinstance(leaf, (list, int)):
        flat = array.ravel().tolist()
        wrong = None if None in flat else max(flat, key=abs)
        what = "a list of numbers with" if isinstance(leaf, list) else "the number"
        raise TypeError(f"{what} {wrong!r}, which no array of numbers holds: replace it, or drop its row")
    if array.ndim == 0:
        raise TypeError(
            f"{type(leaf).__name__}, which is neither an array nor a pytree of arrays: turn it into numbers, "
            "or register its class with jax.tree_util.register_dataclass"
        )
    return array


def is_key(x: Any) -> bool:
    """Return whether an array holds typed PRNG keys, which NumPy cannot hold and XLA holds as integers."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


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
    if dtype.char in "gG":  # long double
        return False
    return dtype.kind in "biufc" or dtype.type.__module__ == "ml_dtypes"
