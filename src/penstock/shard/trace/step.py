"""Trace a step function with abstract arguments: its jaxpr, its flat program, the paths of its leaves, and its state.

`jax.jit` takes shardings for positional arguments only. So the arguments of a call are one tuple, first the positional ones, then
the keyword arguments (`CallForm`). A keyword argument that the step also takes by position is positional here.

The *state* is the results that replace inputs, as new parameters replace old ones. It is found by structure: a result, or a part
of one, has the same tree and shapes as an argument, or a part of one. Two cases need more evidence: several arguments of the same
structure (parameters and momentum), and a single array. There, data flow decides, because an update is computed from the value
that it replaces by elementwise operations.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from penstock._jax import ClosedJaxpr, checkpoints, lowered
from penstock.errors import SplitError
from penstock.shard.trace.calls import held_jaxprs, open_jaxpr
from penstock.shard.trace.fingerprint import fingerprint, hash_numbers
from penstock.shard.trace.flat_program import FlatProgram, aval_bytes, find_meshes, flatten, merge_sums
from penstock.shard.trace.modules import (
    Shared,
    explain_closure,
    has_variables,
    is_variable,
    mark_static,
    put_shared_back,
    refuse_mutable_arrays,
    take_shared_out,
    unmark_static,
    written_arguments,
)
from penstock.shard.trace.rewriting import AS_WRITTEN, Rewriting


@dataclass(frozen=True)
class CallForm:
    """How a tuple of arguments is passed to a step.

    Attributes:
      keywords: the names of the last arguments, which are passed by keyword.
      shared: the places of Flax NNX variables that the arguments have more than once.
    """

    keywords: tuple[str, ...] = ()
    shared: Shared = ()

    def call(
        self, step: Callable, values: tuple, names: tuple[str, ...], read_only: frozenset[int]
    ) -> tuple[Any, dict[int, Any]]:
        """Call a step, and return its result and the arguments to which it wrote.

        Args:
          values: its arguments, as `read_call` returns them.
          read_only: indices of arguments that are not returned.

        Returns:
          The result, in which leaves of Equinox modules that are not arrays are marked as static; and index → argument after the
          call, for each argument that holds Flax NNX objects which the step changed.
        """
        before = tuple(jax.tree_util.tree_flatten(value) if has_variables(value) else None for value in values)
        values = unmark_static(put_shared_back(values, self.shared))
        positional = len(values) - len(self.keywords)
        result = mark_static(step(*values[:positional], **dict(zip(self.keywords, values[positional:], strict=True))))
        if not any(before):
            return result, {}
        after, _ = take_shared_out(mark_static(values))
        return result, {index: after[index] for index in written_arguments(before, after, names) if index not in read_only}


def read_call(step: Callable, args: tuple, kwargs: Mapping[str, Any]) -> tuple[CallForm, tuple]:
    """Return the form of a call, and all its arguments as one tuple.

    The tuple has each Flax NNX variable once, and leaves of Equinox modules that are not arrays are marked as static.

    Raises:
      TypeError: the step takes no such keyword argument, or takes it by position as well.
    """
    keywords: tuple[str, ...] = ()
    if kwargs:
        parameters = _parameters(step)
        if parameters:
            bound = inspect.Signature(parameters).bind_partial(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        order = {parameter.name: index for index, parameter in enumerate(parameters)}
        keywords = tuple(sorted(kwargs, key=lambda name: (order.get(name, len(order)), name)))
    values, shared = take_shared_out(mark_static((*args, *(kwargs[name] for name in keywords))))
    return CallForm(keywords, shared), values


def argument_names(step: Callable, form: CallForm, count: int) -> tuple[str, ...]:
    """Return the names of the arguments of a call; a positional argument without a name has its number."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in _parameters(step) if parameter.kind in positional]
    first = count - len(form.keywords)
    return (*(names[index] if index < len(names) else str(index) for index in range(first)), *form.keywords)


def refuse_option_names(step: Callable, args: tuple, kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Refuse a call of `ps.plan` that gives an argument of the step by the name of an option of `ps.plan`.

    Raises:
      TypeError: the step needs an argument that has the name of an option, or such an option holds arrays. Or a keyword argument
        is neither an option nor a parameter of the step.
    """
    parameters = _parameters(step)
    if not parameters:
        return
    try:
        given = inspect.Signature(parameters).bind_partial(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(
            f"the step {error}; ps.plan takes the keyword arguments of the step, and the options {', '.join(options)}"
        ) from None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in parameters:
        if parameter.name not in options or parameter.name in given or parameter.kind in variadic:
            continue
        needed = parameter.default is parameter.empty
        if needed or any(map(_is_array, jax.tree_util.tree_leaves(options[parameter.name]))):
            raise TypeError(
                f"the step has a parameter {parameter.name!r}, which is also an option of ps.plan, so its argument cannot be "
                "given by that name: give it by position, or plan a function with another name for it"
            )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) or (isinstance(leaf, np.ndarray) and leaf.dtype != object)


def _parameters(step: Callable) -> list[inspect.Parameter]:
    """Return the parameters of a function; [] if they are unknown."""
    try:
        return list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        return []


@dataclass(frozen=True)
class Leaf:
    """An array among the arguments or results of a step.

    Attributes:
      path: such as "state/params/w"; the path of an argument begins with the argument's name.
      shape, dtype: global shape and dtype.
      weak: whether its type is weak, like the type of a Python number.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    weak: bool = False


@dataclass(frozen=True)
class Constant:
    """An array that a step closes over. Programs hold such arrays, so that each device has them whole.

    Attributes:
      shape, dtype, bytes: of the array.
      sources: where the first equation that reads it was traced, then where those around it were, as JAX has it.
    """

    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    sources: tuple[Any, ...] = field(repr=False, compare=False)


_SMALL = 8 << 10
"""Bytes that all constants of a step may have together without being counted, such as tables of indices and keys."""


def find_constants(closed: ClosedJaxpr) -> tuple[Constant, ...]:
    """Return the arrays that a step closes over, the largest first; () if they are small. The same array is there once.

    >>> table = np.ones((512, 64), np.float32)
    >>> step = jax.make_jaxpr(lambda x: jax.jit(lambda x: x @ table)(x))(jax.ShapeDtypeStruct((8, 512), "float32"))
    >>> [(constant.shape, constant.bytes) for constant in find_constants(step)]
    [((512, 64), 131072)]
    """
    found: dict[int, Constant] = {}
    queue: deque[tuple[Any, tuple[Any, ...]]] = deque([(closed, ())])
    while queue:
        each, sources = queue.popleft()
        jaxpr = open_jaxpr(each)
        for variable, value in zip(jaxpr.constvars, getattr(each, "consts", ()), strict=False):
            reader = next((equation for equation in jaxpr.eqns if any(atom is variable for atom in equation.invars)), None)
            where = sources if reader is None else (reader.source_info, *sources)
            aval = variable.aval
            found.setdefault(id(value), Constant(tuple(aval.shape), aval.dtype, aval_bytes(aval), where))
        for equation in jaxpr.eqns:
            queue += ((inner, (equation.source_info, *sources)) for inner in held_jaxprs(equation))
    small = sum(constant.bytes for constant in found.values()) <= _SMALL
    return () if small else tuple(sorted(found.values(), key=lambda constant: -constant.bytes))


@dataclass(frozen=True)
class TracedStep:
    """A traced step function.

    Attributes:
      closed: its closed jaxpr, with consecutive sums merged.
      unmerged: the same before sums were merged.
      program: the jaxpr as a flat program.
      inputs: leaves of all arguments, in order.
      outputs: leaves of the results.
      tree: tree definition of the tuple of arguments.
      out_tree: tree definition of the results.
      state: index of each output that replaces an input → index of that input.
      form: how the arguments are passed to the step.
      written: the indices of the arguments that the step writes to (Flax NNX objects). Their new leaves follow the leaves of
        the results in `outputs`, and are not in `out_tree`.
      returned: for each argument that the step writes to and returns as well, the numbers of the results that are its new leaves.
      high: whether the step has high-level primitives, which JAX lowers before it compiles.
      rewriting: what `program` has, and `closed` has not.
      trace_again: traces the step with other shapes of its arguments.
    """

    closed: ClosedJaxpr
    unmerged: ClosedJaxpr
    program: FlatProgram
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    tree: Any
    out_tree: Any
    state: dict[int, int]
    form: CallForm = field(default_factory=CallForm)
    written: tuple[int, ...] = ()
    returned: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    high: bool = False
    rewriting: Rewriting = AS_WRITTEN
    trace_again: Callable[[tuple], TracedStep] | None = field(default=None, repr=False, compare=False)

    def rewrite(self, rewriting: Rewriting) -> TracedStep:
        """Return the step with a program that a plan changes."""
        return replace(self, program=flatten(self.rewritten(rewriting)), rewriting=rewriting)

    def rewritten(self, rewriting: Rewriting) -> ClosedJaxpr:
        """Return the changed step as a closed jaxpr.

        Raises:
          SplitError: the step cannot run in parts of its batch; the message says why.
        """
        part = None
        if rewriting.microbatches > 1:
            try:
                part = self.resized(rewriting.batch, Fraction(1, rewriting.microbatches)).closed
            except Exception as error:
                raise SplitError(f"the step cannot be traced with a part of its batch: {error}") from error
        return rewriting.apply(self.closed, part)

    def find_batch(self, roles: Sequence[str]) -> tuple[tuple[int, ...], int]:
        """Return the flat arguments that hold rows of the batch, given the roles of all, and the rows; 0 rows without a batch.

        If they have different numbers of rows, it is the greatest common divisor.
        """
        batch = tuple(at for at, role in enumerate(roles) if role == "batch" and self.inputs[at].shape)
        return batch, math.gcd(*(self.inputs[at].shape[0] for at in batch))

    def resized(self, batch: Sequence[int], factor: Fraction) -> TracedStep:
        """Return the step traced with so many times the rows of the given flat arguments."""
        assert self.trace_again is not None
        shapes = [leaf.shape for leaf in self.inputs]
        for at in batch:
            shapes[at] = (int(shapes[at][0] * factor), *shapes[at][1:])
        leaves = [
            jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=leaf.weak) for shape, leaf in zip(shapes, self.inputs, strict=True)
        ]
        with checkpoints(self.rewriting.checkpoints):
            again = self.trace_again(jax.tree_util.tree_unflatten(self.tree, leaves))
        return replace(again, rewriting=self.rewriting)

    @functools.cached_property
    def constants(self) -> tuple[Constant, ...]:
        """Return the arrays that the step closes over (`find_constants`)."""
        return find_constants(self.closed)

    @property
    def constant_bytes(self) -> int:
        """Return the bytes of these arrays, which each device has whole."""
        return sum(constant.bytes for constant in self.constants)

    @property
    def arguments(self) -> list[int]:
        """Return the number of the argument that each input belongs to."""
        return [number for number, argument in enumerate(self.tree.children()) for _ in range(argument.num_leaves)]

    def meshes(self) -> list[Any]:
        """Return the meshes that the step itself names in `with_sharding_constraint` and `shard_map`."""
        return find_meshes(self.closed.jaxpr)

    def fingerprint(self) -> str:
        """Return the fingerprint of the arguments and the program (`penstock.shard.trace.fingerprint`)."""
        return fingerprint(self.inputs, self.closed.jaxpr)

    def numbers(self) -> str:
        """Return a hash of the numbers written in the program, which the fingerprint leaves out."""
        return hash_numbers(self.closed.jaxpr)


def trace(step: Callable, args: tuple, weak: Sequence[bool] | None = None, kwargs: Mapping[str, Any] | None = None) -> TracedStep:
    """Trace a step with abstract arguments: pytrees of arrays, or of anything with a shape and a dtype. Nothing is allocated.

    Weak types, results and errors are as in `trace_form`.

    >>> step = trace(lambda w, x: w - x, (jax.ShapeDtypeStruct((4,), "float32"),) * 2)
    >>> [leaf.path for leaf in step.inputs], step.state
    (['w', 'x'], {0: 0})
    """
    return trace_form(step, *read_call(step, args, kwargs or {}), weak)


def trace_form(
    step: Callable,
    form: CallForm,
    values: tuple,
    weak: Sequence[bool] | None = None,
    read_only: frozenset[int] = frozenset(),
    returned: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
) -> TracedStep:
    """Trace a step with abstract arguments in one tuple.

    Args:
      form, values: its arguments, as `read_call` returns them.
      weak: for each leaf, whether its type is weak; None takes this from the leaves.
      read_only: indices of arguments that the step does not change, although it returns their variables.
      returned: arguments that it changes and returns, as in `TracedStep`.

    Returns:
      The traced step. A step under `jax.jit` gives the same as the step without it.

    Raises:
      TypeError: an argument holds a leaf that is not an array.
      ValueError: the step has side effects other than unordered ones of `jax.debug`; it writes to Flax NNX objects that are not
        arguments; or the variables of an argument are mutable arrays.
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
    counts = [len(jax.tree_util.tree_leaves(value)) for value in abstract]
    leaves_of = [range(end - count, end) for count, end in zip(counts, itertools.accumulate(counts), strict=True)]
    replaced = {output: leaves_of[argument][leaf] for argument, outs in returned.items() for leaf, output in enumerate(outs)}
    for argument in sorted(written):
        for index in leaves_of[argument]:
            replaced[len(outputs)] = index
            outputs.append(inputs[index])
    unmerged = lowered(closed)
    high, closed = unmerged is not closed, merge_sums(unmerged)
    program = flatten(closed)
    # `nnx.jit` returns all variables of its arguments, also those that it does not change.
    unchanged = {index for index in written if _is_unchanged(program, replaced, leaves_of[index])}
    # A step that changes an argument and returns it as well has its new values once among its results.
    again = {}
    for index in sorted(set(written) - unchanged):
        if (leaves := _find_returned(program, replaced, leaves_of[index], len(out_flat))) is not None:
            again[index] = leaves
    if unchanged - read_only or again:
        return trace_form(step, form, values, weak, read_only | unchanged, {**returned, **again})
    state = find_state(program, abstract, out, replaced)
    changed = tuple(sorted(written))
    traced = TracedStep(closed, unmerged, program, inputs, tuple(outputs), tree, out_tree, state, form, changed, returned, high)
    return replace(traced, trace_again=lambda values: trace_form(step, form, values, weak, read_only, returned))


_JITTED = type(jax.jit(lambda: None))

_UNORDERED_DEBUG = "Debug"
"""The effect of `jax.debug.print` and `jax.debug.callback`, unless they are ordered."""


def _is_unchanged(program: FlatProgram, replaced: Mapping[int, int], leaves: range) -> bool:
    """Return whether all outputs that replace leaves of an argument are these leaves, unchanged."""
    return all(program.outputs[output] == program.inputs[index] for output, index in replaced.items() if index in leaves)


def _find_returned(program: FlatProgram, replaced: Mapping[int, int], leaves: range, results: int) -> tuple[int, ...] | None:
    """Return the numbers of the results that are the new leaves of an argument; None if not all of them are results.

    The new leaves of arguments are the outputs after the first `results`.
    """
    by_value: dict[int | None, int] = {}
    for number, value in enumerate(program.outputs[:results]):
        if value is not None:
            by_value.setdefault(value, number)
    own = sorted((index, output) for output, index in replaced.items() if output >= results and index in leaves)
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

    Raises:
      TypeError: an argument holds a leaf that is not an array.
    """
    names = argument_names(step, form, len(values))
    return _leaves(names, tuple(_abstract_tree(value, name) for name, value in zip(names, values, strict=True)))


def tree_leaves(tree: Any) -> list[Leaf]:
    """Return the leaves of a tree of arrays or Python numbers.

    Raises:
      TypeError: it holds a leaf that is not an array.
    """
    flat = jax.tree_util.tree_leaves(_abstract_tree(tree))
    return [Leaf(path, tuple(leaf.shape), leaf.dtype) for path, leaf in zip(leaf_paths(tree), flat, strict=True)]


def leaf_paths(tree: Any) -> list[str]:
    """Return the path of each leaf: keys, attributes and indices, joined by "/".

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
    """Return the dtype that an array has in a JAX program: without `jax_enable_x64`, 64-bit types become 32-bit types."""
    extended = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended)
    return leaf.dtype if extended else jax.dtypes.canonicalize_dtype(leaf.dtype)


# State

_MOST_VALUES = 400
"""The most values that are visited when a result is traced back."""


def find_state(program: FlatProgram, args: tuple, out: Any, known: Mapping[int, int]) -> dict[int, int]:
    """Return the state: index of each flattened result that replaces an input → index of that input.

    Args:
      known: state that is certain, in the same form; its results may follow the leaves of `out`.
    """
    elementwise = _ElementwiseDistances(program)
    state = dict(known)
    replaced = set(known.values())
    by_signature: dict[Any, list[tuple[int, bool]]] = {}
    for start, arg in _children(args):
        by_signature.setdefault(_signature(arg), []).append((start, True))
        for first, tree in _subtrees(start, arg):
            by_signature.setdefault(_signature(tree), []).append((first, False))
    queue = deque([(0, out)])
    while queue:
        index, part = queue.popleft()
        count = len(jax.tree_util.tree_leaves(part))
        best: tuple[float, int] | None = None
        for first, is_argument in by_signature.get(_signature(part), ()) if count else ():
            if replaced.isdisjoint(range(first, first + count)):
                distances = [elementwise.distance(index + leaf, first + leaf) for leaf in range(count)]
                certain = is_argument and (not jax.tree_util.all_leaves([part]) or elementwise.is_input(index))
                # Distance 0 does not tell which of two inputs a result replaces, as in (previous, current) → (current, next).
                nearness = sum(1 / distance for distance in distances if distance)
                related = any(distance is not None for distance in distances)
                if (certain or related) and (best is None or nearness > best[0]):
                    best = (nearness, first)
        if best is None:
            queue.extend((index + first, child) for first, child in _children(part) if child is not part)
        else:
            replaced.update(range(best[1], best[1] + count))
            state.update({index + leaf: best[1] + leaf for leaf in range(count)})
    return dict(sorted(state.items()))


class _ElementwiseDistances:
    """Distances between inputs and results, in elementwise operations."""

    def __init__(self, program: FlatProgram):
        self._program = program
        self._sources: dict[int, list[int]] = {}
        self._distances: dict[int, Mapping[int, int]] = {}
        shapes = [value.shape for value in program.values]
        for op in program.ops:
            if op.rule.identity:
                for result in op.results:
                    same_shape = [value for value in op.operands if value is not None and shapes[value] == shapes[result]]
                    self._sources.setdefault(result, []).extend(same_shape)
        for pair in program.same_sharding:
            if not pair.skip:
                self._sources.setdefault(pair.outer, []).append(pair.inner)
                self._sources.setdefault(pair.inner, []).append(pair.outer)

    def is_input(self, output: int) -> bool:
        """Return whether a result is an unchanged input."""
        return self._program.outputs[output] in self._program.inputs

    def distance(self, output: int, index: int) -> int | None:
        """Return the number of elementwise operations between an input and a result; None if no chain connects them."""
        value = self._program.outputs[output]
        if value is None:
            return None
        if value not in self._distances:
            self._distances[value] = self._search_back(value)
        return self._distances[value].get(self._program.inputs[index])

    def _search_back(self, value: int) -> Mapping[int, int]:
        """Return the distances from a value to the values that it is computed from, by breadth-first search."""
        distances, queue = {value: 0}, deque([value])
        while queue and len(distances) < _MOST_VALUES:
            reached = queue.popleft()
            for source in self._sources.get(reached, ()):
                if source not in distances:
                    distances[source] = distances[reached] + 1
                    queue.append(source)
        return distances


def _children(tree: Any) -> Iterator[tuple[int, Any]]:
    """Yield the children of a pytree node, each with the index of its first leaf. A leaf yields itself."""
    first = 0
    for child in jax.tree_util.tree_flatten(tree, is_leaf=lambda node: node is not tree)[0]:
        yield first, child
        first += len(jax.tree_util.tree_leaves(child))


def _subtrees(start: int, tree: Any) -> Iterator[tuple[int, Any]]:
    """Yield all proper subtrees, each with the index of its first leaf, where the tree's first leaf has the index `start`."""
    for first, child in _children(tree):
        if child is not tree:
            yield start + first, child
            yield from _subtrees(start + first, child)


def _signature(tree: Any) -> Any:
    """Return the structure, shapes and dtypes of a tree."""
    flat, structure = jax.tree_util.tree_flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in flat)
