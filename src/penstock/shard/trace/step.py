"""What a step function does with its arguments: its jaxpr, the paths of its leaves, and which of them are state."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from penstock._jax import ClosedJaxpr
from penstock.shard.trace.fingerprint import fingerprint
from penstock.shard.trace.flat_program import FlatProgram, flatten
from penstock.shard.trace.state import find_state


@dataclass(frozen=True)
class Leaf:
    """An array among the arguments or results.

    Attributes:
      path: "state/params/w", with the name of the argument first.
      shape, dtype: of it.
      weak: whether its type is weak, as that of a Python number.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    weak: bool = False


@dataclass(frozen=True)
class TracedStep:
    """A step function, looked at.

    Attributes:
      closed: its jaxpr.
      program: the same, written out flat.
      inputs: leaves of all arguments, in order.
      outputs: leaves of what it returns.
      tree: of the tuple of arguments.
      out_tree: of what it returns.
      state: of each output that replaces an input, the place of that input.
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


def trace(step: Callable, args: tuple, weak: Sequence[bool] | None = None) -> TracedStep:
    """Trace a step with abstract arguments.

    Args:
      step: any function that jax.jit takes.
      args: its positional arguments: pytrees of arrays, or of anything with a shape and a dtype. Nothing is allocated.
      weak: of each leaf, whether its type is weak, as that of a Python number; None takes it from the leaf.

    Raises:
      whatever the step raises while it is traced, as it is.
      TypeError: an argument holds a leaf that is no array.
      ValueError: the step has side effects; or a mesh with explicit axes is set.
    """
    if jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        raise ValueError(
            "under jax.set_mesh of a mesh with explicit axes the types of arrays say how they are laid out, which a plan is to "
            "decide; leave that context, or make the mesh with axis_types=(jax.sharding.AxisType.Auto, ...)"
        )
    names = _names(step, len(args))
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
    if isinstance(step, _JITTED) and _only_calls_jit(closed):  # a decorated step is the step
        return trace(inspect.unwrap(step, stop=lambda each: not isinstance(each, _JITTED)), args, weak)
    if closed.effects:
        effects = ", ".join(sorted(str(effect) for effect in closed.effects))
        raise ValueError(f"the step has side effects ({effects}), which a plan cannot keep in order; take them out of the step")
    flat, tree = jax.tree_util.tree_flatten(abstract)
    inputs = tuple(
        Leaf(path, tuple(each.shape), each.dtype, each.weak_type)
        for path, each in zip(_argument_paths(names, abstract), flat, strict=True)
    )
    out_flat, out_tree = jax.tree_util.tree_flatten(out)
    outputs = tuple(Leaf(path, tuple(each.shape), each.dtype) for path, each in zip(leaf_paths(out), out_flat, strict=True))
    program = flatten(closed)
    return TracedStep(closed, program, inputs, outputs, tree, out_tree, find_state(program, abstract, out))


_JITTED = type(jax.jit(lambda: None))


def _only_calls_jit(closed: ClosedJaxpr) -> bool:
    """Whether a program is one call of a jitted function that lays nothing out."""
    if len(closed.jaxpr.eqns) != 1 or closed.jaxpr.eqns[0].primitive.name != "jit":
        return False
    params = closed.jaxpr.eqns[0].params
    return not any(isinstance(each, jax.sharding.Sharding) for each in (*params["in_shardings"], *params["out_shardings"]))


def leaf_paths(tree: Any) -> list[str]:
    """The path of each leaf: keys, attributes and places, joined by "/"."""
    return ["/".join(_name(key) for key in path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _argument_paths(names: Sequence[str], args: tuple) -> list[str]:
    """Each begins with the name of its argument."""
    return [f"{name}/{path}" if path else name for name, arg in zip(names, args, strict=True) for path in leaf_paths(arg)]


def _names(step: Callable, count: int) -> list[str]:
    """The names of the first arguments; the number of one that has none."""
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [each.name for each in parameters if each.kind in positional]
    return [names[number] if number < len(names) else str(number) for number in range(count)]


def _name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return re.sub(r"^[.\[]|\]$", "", str(key))


def _abstract(name: str, path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, (bool, int, float, complex)):
        leaf = jax.eval_shape(lambda: jax.numpy.asarray(leaf))
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        where = "/".join([name, *map(_name, path)])
        raise TypeError(f"the argument has a leaf at {where!r} that is no array: {type(leaf).__name__}; close over it instead")
    return jax.ShapeDtypeStruct(leaf.shape, canonical_dtype(leaf), weak_type=getattr(leaf, "weak_type", False))


def as_array(leaf: Any) -> Any:
    """A leaf that has a shape and a dtype: a Python number as JAX takes it."""
    return leaf if hasattr(leaf, "dtype") else jax.eval_shape(lambda: jax.numpy.asarray(leaf))


def canonical_dtype(leaf: Any) -> Any:
    """The dtype that an array has in a program: without jax_enable_x64 that is of 32 bits where NumPy's is of 64."""
    extended = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended)
    return leaf.dtype if extended else jax.dtypes.canonicalize_dtype(leaf.dtype)
