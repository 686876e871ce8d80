"""Trace a step function with abstract arguments: its jaxpr, its flat program, the paths of its leaves, and its state."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from penstock._jax import ClosedJaxpr
from penstock.shard.trace.fingerprint import fingerprint, hash_numbers
from penstock.shard.trace.flat_program import FlatProgram, flatten
from penstock.shard.trace.state import find_state


@dataclass(frozen=True)
class Leaf:
    """An array among the arguments or results of a step.

    Attributes:
      path: such as "state/params/w"; that of an argument begins with the argument's name.
      shape, dtype: global shape and dtype.
      weak: whether its type is weak, as that of a Python number.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    weak: bool = False


@dataclass(frozen=True)
class TracedStep:
    """A traced step function.

    Attributes:
      closed: its closed jaxpr.
      program: the jaxpr as a flat program.
      inputs: leaves of all arguments, in order.
      outputs: leaves of the results.
      tree: tree definition of the tuple of arguments.
      out_tree: tree definition of the results.
      state: index of each output that replaces an input → index of that input.
    """

    closed: ClosedJaxpr
    program: FlatProgram
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    tree: Any
    out_tree: Any
    state: dict[int, int]

    def fingerprint(self) -> str:
        """Return the fingerprint of the arguments and the program (`penstock.shard.trace.fingerprint`)."""
        return fingerprint(self.inputs, self.closed.jaxpr)

    def numbers(self) -> str:
        """Return a hash of the numbers written in the program, which the fingerprint leaves out."""
        return hash_numbers(self.closed.jaxpr)


def trace(step: Callable, args: tuple, weak: Sequence[bool] | None = None) -> TracedStep:
    """Trace a step with abstract arguments.

    Args:
      step: any function that jax.jit takes.
      args: its positional arguments: pytrees of arrays, or of anything with a shape and a dtype. Nothing is allocated.
      weak: for each leaf, whether its type is weak, as that of a Python number; None takes this from the leaves.

    Returns:
      The traced step. A step under `jax.jit` gives the same as the step without it.

    Raises:
      TypeError: an argument holds a leaf that is not an array.
      ValueError: the step has side effects other than unordered ones of `jax.debug`, or a mesh with explicit axes is set.
      Exception: errors that the step raises while it is traced are passed on.

    >>> step = trace(lambda w, x: w - x, (jax.ShapeDtypeStruct((4,), "float32"),) * 2)
    >>> [leaf.path for leaf in step.inputs], step.state
    (['w', 'x'], {0: 0})
    """
    if jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        raise ValueError(
            "under jax.set_mesh of a mesh with explicit axes the types of arrays say how they are laid out, which a plan is to "
            "decide; leave that context, or make the mesh with axis_types=(jax.sharding.AxisType.Auto, ...)"
        )
    names = _argument_names(step, len(args))
    abstract = tuple(
        jax.tree_util.tree_map_with_path(lambda path, leaf, name=name: _abstract(name, path, leaf), arg)
        for name, arg in zip(names, args, strict=True)
    )
    if weak is not None and len(weak) == len(jax.tree_util.tree_leaves(abstract)):
        types = iter(weak)
        abstract = jax.tree_util.tree_map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=next(types)), abstract
        )
    closed, out = jax.make_jaxpr(step, return_shape=True)(*abstract)
    if isinstance(step, _JITTED) and _only_calls_jit(closed):  # Trace the step without `jax.jit`.
        return trace(inspect.unwrap(step, stop=lambda function: not isinstance(function, _JITTED)), args, weak)
    if effects := sorted({str(effect) for effect in closed.effects} - {_UNORDERED_DEBUG}):
        raise ValueError(
            f"the step has side effects ({', '.join(effects)}), which a plan cannot keep in order; take them out of the step. "
            "It keeps jax.debug.print and jax.debug.callback with ordered=False"
        )
    flat, tree = jax.tree_util.tree_flatten(abstract)
    inputs = tuple(
        Leaf(path, tuple(leaf.shape), leaf.dtype, leaf.weak_type)
        for path, leaf in zip(_argument_paths(names, abstract), flat, strict=True)
    )
    out_flat, out_tree = jax.tree_util.tree_flatten(out)
    outputs = tuple(Leaf(path, tuple(leaf.shape), leaf.dtype) for path, leaf in zip(leaf_paths(out), out_flat, strict=True))
    program = flatten(closed)
    return TracedStep(closed, program, inputs, outputs, tree, out_tree, find_state(program, abstract, out))


_JITTED = type(jax.jit(lambda: None))

_UNORDERED_DEBUG = "Debug"
"""The effect of `jax.debug.print` and `jax.debug.callback`, unless they are ordered."""


def _only_calls_jit(closed: ClosedJaxpr) -> bool:
    """Return whether a program is one call of a jitted function that prescribes no shardings."""
    if len(closed.jaxpr.eqns) != 1 or closed.jaxpr.eqns[0].primitive.name != "jit":
        return False
    params = closed.jaxpr.eqns[0].params
    shardings = (*params["in_shardings"], *params["out_shardings"])
    return not any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)


def leaf_paths(tree: Any) -> list[str]:
    """Return the path of each leaf: keys, attributes and indices, joined by "/".

    Args:
      tree: a pytree.

    >>> leaf_paths({"a": [1.0, 2.0]})
    ['a/0', 'a/1']
    """
    return ["/".join(_key_name(key) for key in path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _argument_paths(names: Sequence[str], args: tuple) -> list[str]:
    """Return the path of each leaf of the arguments, which begins with the name of the argument."""
    return [f"{name}/{path}" if path else name for name, arg in zip(names, args, strict=True) for path in leaf_paths(arg)]


def _argument_names(step: Callable, count: int) -> list[str]:
    """Return the names of the first `count` positional arguments; an argument without a name has its number."""
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in positional]
    return [names[index] if index < len(names) else str(index) for index in range(count)]


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return re.sub(r"^[.\[]|\]$", "", str(key))


def _abstract(name: str, path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a leaf of the argument `name`."""
    if isinstance(leaf, (bool, int, float, complex)):
        leaf = jax.eval_shape(lambda: jax.numpy.asarray(leaf))
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        where = "/".join([name, *map(_key_name, path)])
        raise TypeError(f"an argument has a leaf at {where!r} that is not an array: {type(leaf).__name__}; close over it instead")
    return jax.ShapeDtypeStruct(leaf.shape, canonical_dtype(leaf), weak_type=getattr(leaf, "weak_type", False))


def as_array(leaf: Any) -> Any:
    """Return an object with a shape and a dtype: an array itself, or the abstract array of a Python number.

    Args:
      leaf: a leaf of a pytree.
    """
    return leaf if hasattr(leaf, "dtype") else jax.eval_shape(lambda: jax.numpy.asarray(leaf))


def canonical_dtype(leaf: Any) -> Any:
    """Return the dtype that an array has in a JAX program: without `jax_enable_x64`, 64-bit types become 32-bit types.

    Args:
      leaf: an array, or anything with a dtype.
    """
    extended = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended)
    return leaf.dtype if extended else jax.dtypes.canonicalize_dtype(leaf.dtype)
