"""Trace a step function with abstract arguments: its jaxpr, its flat program, the paths of its leaves, and its state."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax

from penstock._jax import ClosedJaxpr
from penstock.shard.trace.call import CallForm, argument_names, read_call
from penstock.shard.trace.fingerprint import fingerprint, hash_numbers
from penstock.shard.trace.flat_program import FlatProgram
from penstock.shard.trace.flatten import flatten
from penstock.shard.trace.merge_sums import merge_sums
from penstock.shard.trace.modules import explain_closure, has_variables, is_variable, refuse_mutable_arrays
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
      form: how the arguments are passed to the step.
      written: the indices of the arguments that the step writes to (Flax NNX objects). Their new leaves follow those of the
        results in `outputs`, and are not in `out_tree`.
      returned: for each argument that the step writes to and returns as well, the numbers of the results that are its new leaves.
    """

    closed: ClosedJaxpr
    program: FlatProgram
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    tree: Any
    out_tree: Any
    state: dict[int, int]
    form: CallForm = field(default_factory=CallForm)
    written: tuple[int, ...] = ()
    returned: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def arguments(self) -> list[int]:
        """Return the number of the argument that each input belongs to."""
        return [number for number, argument in enumerate(self.tree.children()) for _ in range(argument.num_leaves)]

    def fingerprint(self) -> str:
        """Return the fingerprint of the arguments and the program (`penstock.shard.trace.fingerprint`)."""
        return fingerprint(self.inputs, self.closed.jaxpr)

    def numbers(self) -> str:
        """Return a hash of the numbers written in the program, which the fingerprint leaves out."""
        return hash_numbers(self.closed.jaxpr)


def trace(step: Callable, args: tuple, weak: Sequence[bool] | None = None, kwargs: Mapping[str, Any] | None = None) -> TracedStep:
    """Trace a step with abstract arguments.

    Args:
      step: any function that jax.jit takes.
      args: its positional arguments: pytrees of arrays, or of anything with a shape and a dtype. Nothing is allocated.
      weak, kwargs: as in `trace_form`; and its keyword arguments.

    Returns, raises:
      As `trace_form`.

    >>> step = trace(lambda w, x: w - x, (jax.ShapeDtypeStruct((4,), "float32"),) * 2)
    >>> [leaf.path for leaf in step.inputs], step.state
    (['w', 'x'], {0: 0})
    """
    return trace_form(step, *read_call(step, args, kwargs or {}), weak)


_NONE: Mapping[int, tuple[int, ...]] = MappingProxyType({})


def trace_form(
    step: Callable,
    form: CallForm,
    values: tuple,
    weak: Sequence[bool] | None = None,
    read_only: frozenset[int] = frozenset(),
    returned: Mapping[int, tuple[int, ...]] = _NONE,
) -> TracedStep:
    """Trace a step with abstract arguments in one tuple.

    Args:
      step: any function that jax.jit takes.
      form, values: its arguments, as `read_call` returns them.
      weak: for each leaf, whether its type is weak, as that of a Python number; None takes this from the leaves.
      read_only: indices of arguments that the step does not change, although it returns their variables.
      returned: arguments that it changes and returns, as in `TracedStep`.

    Returns:
      The traced step. A step under `jax.jit` gives the same as the step without it.

    Raises:
      TypeError: an argument holds a leaf that is not an array.
      ValueError: the step has side effects other than unordered ones of `jax.debug`, or it writes to Flax NNX objects that are
        not arguments, or the variables of an argument are mutable arrays.
      Exception: errors that the step raises while it is traced are passed on.
    """
    names = argument_names(step, form, len(values))
    for name, value in zip(names, values, strict=True):
        refuse_mutable_arrays(name, value)
    abstract = tuple(_abstract_tree(value, name) for name, value in zip(names, values, strict=True))
    if weak is not None and len(weak) == len(jax.tree_util.tree_leaves(abstract)):
        types = iter(weak)
        abstract = jax.tree_util.tree_map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=next(types)), abstract
        )
    inner = inspect.unwrap(step, stop=lambda function: not isinstance(function, _JITTED))
    if has_variables(values):
        step = inner  # `jax.jit` would lose what the step writes to modules

    def call(*values: Any) -> Any:
        return form.call(step, values, names, read_only | set(returned))

    try:
        closed, (out, written) = jax.make_jaxpr(call, return_shape=True)(*abstract)
    except Exception as error:
        if advice := explain_closure(error, step):
            raise ValueError(advice) from error
        raise
    if inner is not step and _only_calls_jit(closed):  # Trace the step without `jax.jit`.
        return trace_form(inner, form, values, weak)
    if effects := sorted({str(effect) for effect in closed.effects} - {_UNORDERED_DEBUG}):
        raise ValueError(
            f"the step has side effects ({', '.join(effects)}), which a plan cannot keep in order; take them out of the step. "
            "It keeps jax.debug.print and jax.debug.callback with ordered=False"
        )
    tree = jax.tree_util.tree_structure(abstract)
    inputs = _leaves(names, abstract)
    out_flat, out_tree = jax.tree_util.tree_flatten(out)
    outputs = [Leaf(path, tuple(leaf.shape), leaf.dtype) for path, leaf in zip(leaf_paths(out), out_flat, strict=True)]
    starts = [len(jax.tree_util.tree_leaves(abstract[:argument])) for argument in range(len(abstract))]
    replaced = {output: starts[argument] + leaf for argument, leaves in returned.items() for leaf, output in enumerate(leaves)}
    for argument in sorted(written):
        first = starts[argument]
        for index in range(first, first + len(jax.tree_util.tree_leaves(abstract[argument]))):
            replaced[len(outputs)] = index
            outputs.append(inputs[index])
    closed = merge_sums(closed)
    program = flatten(closed)
    # `nnx.jit` returns all variables of its arguments, also those that it does not change.
    unchanged = {index for index in written if _is_unchanged(program, replaced, abstract, index)}
    # A step that changes an argument and returns it as well has its new values once among its results.
    again = {}
    for index in sorted(set(written) - unchanged):
        if (leaves := _find_returned(program, replaced, starts, index, len(out_flat))) is not None:
            again[index] = leaves
    if unchanged - read_only or again:
        return trace_form(step, form, values, weak, read_only | unchanged, {**returned, **again})
    state = find_state(program, abstract, out, replaced)
    return TracedStep(closed, program, inputs, tuple(outputs), tree, out_tree, state, form, tuple(sorted(written)), returned)


_JITTED = type(jax.jit(lambda: None))

_UNORDERED_DEBUG = "Debug"
"""The effect of `jax.debug.print` and `jax.debug.callback`, unless they are ordered."""


def _is_unchanged(program: FlatProgram, replaced: Mapping[int, int], args: tuple, argument: int) -> bool:
    """Return whether all leaves of an argument come back as they went in, of those that outputs replace."""
    first = len(jax.tree_util.tree_leaves(args[:argument]))
    leaves = range(first, first + len(jax.tree_util.tree_leaves(args[argument])))
    return all(program.outputs[output] == program.inputs[index] for output, index in replaced.items() if index in leaves)


def _find_returned(
    program: FlatProgram, replaced: Mapping[int, int], starts: Sequence[int], argument: int, results: int
) -> tuple[int, ...] | None:
    """Return the numbers of the results that are the new leaves of an argument; None if not all of them are results.

    Args:
      program: the step; the new leaves of arguments are outputs after the results.
      replaced: outputs that replace inputs.
      starts: the number of the first leaf of each argument.
      argument: the argument.
      results: the number of results.
    """
    by_value: dict[int | None, int] = {}
    for number, value in enumerate(program.outputs[:results]):
        if value is not None:
            by_value.setdefault(value, number)
    end = starts[argument + 1] if argument + 1 < len(starts) else len(program.inputs)
    own = sorted((index, output) for output, index in replaced.items() if output >= results and starts[argument] <= index < end)
    values = [program.outputs[output] for _, output in own]
    found = tuple(by_value[value] for value in values if value in by_value)
    return found if found and len(set(found)) == len(values) else None


def _only_calls_jit(closed: ClosedJaxpr) -> bool:
    """Return whether a program is one call of a jitted function that prescribes no shardings."""
    if len(closed.jaxpr.eqns) != 1 or closed.jaxpr.eqns[0].primitive.name != "jit":
        return False
    params = closed.jaxpr.eqns[0].params
    shardings = (*params["in_shardings"], *params["out_shardings"])
    return not any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)


def argument_leaves(step: Callable, form: CallForm, values: tuple) -> tuple[Leaf, ...]:
    """Return the leaves of the arguments of a call, as `trace_form` does, without tracing the step.

    Args:
      step: the step.
      form, values: its arguments, as `read_call` returns them.

    Raises:
      TypeError: an argument holds a leaf that is not an array.
    """
    names = argument_names(step, form, len(values))
    return _leaves(names, tuple(_abstract_tree(value, name) for name, value in zip(names, values, strict=True)))


def tree_leaves(tree: Any) -> list[Leaf]:
    """Return the leaves of a tree of arrays or Python numbers.

    Args:
      tree: a pytree.

    Raises:
      TypeError: it holds a leaf that is not an array.
    """
    flat = jax.tree_util.tree_leaves(_abstract_tree(tree))
    return [Leaf(path, tuple(leaf.shape), leaf.dtype) for path, leaf in zip(leaf_paths(tree), flat, strict=True)]


def leaf_paths(tree: Any) -> list[str]:
    """Return the path of each leaf: keys, attributes and indices, joined by "/".

    Args:
      tree: a pytree.

    >>> leaf_paths({"a": [1.0, 2.0]})
    ['a/0', 'a/1']
    """
    paths = []
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_variable)[0]:
        below = [rest for rest, _ in jax.tree_util.tree_flatten_with_path(node)[0]] if is_variable(node) else [()]
        # A variable with one array is the array to its user: "model/kernel", and not "model/kernel/value".
        paths += ["/".join(map(_key_name, path if len(below) == 1 else (*path, *rest))) for rest in below]
    return paths


def _leaves(names: Sequence[str], args: tuple) -> tuple[Leaf, ...]:
    """Return the leaves of abstract arguments. The path of each begins with the name of its argument."""
    paths = [f"{name}/{path}" if path else name for name, arg in zip(names, args, strict=True) for path in leaf_paths(arg)]
    flat = jax.tree_util.tree_leaves(args)
    return tuple(Leaf(path, tuple(leaf.shape), leaf.dtype, leaf.weak_type) for path, leaf in zip(paths, flat, strict=True))


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return re.sub(r"^[.\[]|\]$", "", str(key))


def _abstract_tree(tree: Any, name: str | None = None) -> Any:
    """Return the shapes and dtypes of a tree of arrays, which is the argument of this name, if it has one."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _abstract(path, leaf, tree, name), tree)


def _abstract(path: Any, leaf: Any, tree: Any, name: str | None) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a leaf of a tree."""
    if isinstance(leaf, (bool, int, float, complex)):
        leaf = jax.eval_shape(lambda: jax.numpy.asarray(leaf))
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        where = "/".join([*([] if name is None else [name]), *map(_key_name, path)])
        kind = "a function" if callable(leaf) else type(leaf).__name__
        if name is None:
            raise TypeError(f"the tree has a leaf at {where!r} that is not an array: {kind}")
        raise TypeError(f"an argument has a leaf at {where!r} that is not an array: {type(leaf).__name__}; close over it instead")
    return jax.ShapeDtypeStruct(leaf.shape, canonical_dtype(leaf), weak_type=getattr(leaf, "weak_type", False))


def canonical_dtype(leaf: Any) -> Any:
    """Return the dtype that an array has in a JAX program: without `jax_enable_x64`, 64-bit types become 32-bit types.

    Args:
      leaf: an array, or anything with a dtype.
    """
    extended = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended)
    return leaf.dtype if extended else jax.dtypes.canonicalize_dtype(leaf.dtype)
