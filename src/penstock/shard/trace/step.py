"""What a step function does with its arguments: its jaxpr, the paths of its leaves, and which of them are state."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend import core

from penstock._jax import ClosedJaxpr
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
        """Of the paths, shapes and dtypes of the arguments, and of the program: 16 hexadecimal digits."""
        described = [f"{leaf.path}{leaf.shape}{leaf.dtype}" for leaf in self.inputs]
        hashed = hashlib.sha256("\n".join(described).encode())
        _feed(hashed, self.closed.jaxpr)
        return hashed.hexdigest()[:16]


class Described(Protocol):
    """A leaf, of a step or of a plan."""

    @property
    def path(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


def describe_difference(inputs: Sequence[Described], outputs: Sequence[Described], traced: TracedStep) -> str:
    """What differs between a step and the one with these leaves."""
    said = [*_leaves_differ(inputs, traced.inputs, "argument"), *_leaves_differ(outputs, traced.outputs, "result")]
    if not said:
        return (
            "arguments and results are the same, and the program differs: in an operation, or in a number written in it, such as "
            "a learning rate; plan it again"
        )
    more = f", and {len(said) - 3} differences more" if len(said) > 3 else ""
    return "; ".join(said[:3]) + more


def _leaves_differ(planned: Sequence[Described], traced: Sequence[Described], what: str) -> list[str]:
    here, there = ({leaf.path: leaf for leaf in leaves} for leaves in (traced, planned))
    said = []
    for path, leaf in there.items():
        if path not in here:
            said.append(f"the plan has the {what} {path!r}, {_type(leaf)}, which the step has not")
        elif _type(leaf) != _type(here[path]):
            said.append(f"the {what} {path!r} is {_type(leaf)} in the plan, and {_type(here[path])} in the step")
    said += [f"the step has the {what} {path!r}, which the plan has not" for path in here if path not in there]
    if not said and list(here) != list(there):
        one, other = next(pair for pair in zip(there, here, strict=True) if pair[0] != pair[1])
        said.append(f"the {what}s are in another order: the plan has {one!r} where the step has {other!r}")
    return said


def _type(leaf: Described) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


_SAYS_NOTHING = frozenset(["name", "ctx_mesh", "debug_info", "precision"])
"""Parameters of equations that differ where what is computed does not: names, and how exactly it is computed, which is often a
setting of the process (jax_default_matmul_precision) and changes no layout."""


_SAYS_NO_MORE = _SAYS_NOTHING | {"sharding", "out_sharding"}
"""Of equations that ask for no layout these say only whether a mesh was set around the step (`jax.set_mesh`)."""

_ASKS_FOR_A_LAYOUT = frozenset(["sharding_constraint", "reshard", "device_put"])


def _described(value: Any) -> str:
    """A parameter of an equation as text that is the same in every process; of functions and the like, nothing.

    So two steps that differ in nothing else have one fingerprint. The text of a function would differ between processes.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, Enum)):
        return str(value)
    if isinstance(value, (np.dtype, np.generic, jax.sharding.PartitionSpec, type)):
        return str(value)
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(_described, value))})"
    if isinstance(value, (set, frozenset)):
        return f"({','.join(sorted(map(_described, value)))})"
    if isinstance(value, Mapping):
        return f"({','.join(f'{key}={_described(value[key])}' for key in sorted(value, key=str))})"
    if isinstance(value, jax.sharding.NamedSharding):
        return f"{value.spec}{dict(value.mesh.shape)}"
    if is_dataclass(value) and not hasattr(value, "jaxpr"):
        return _described({each.name: getattr(value, each.name) for each in fields(value)})
    return ""


def _feed(hashed: Any, jaxpr: Any) -> None:
    """The operations of a program, and what they read, to a hash."""
    number: dict[Any, int] = {}
    for variable in (*jaxpr.constvars, *jaxpr.invars):
        number[variable] = len(number)
    for equation in jaxpr.eqns:
        read = [str(each) if isinstance(each, core.Literal) else str(number[each]) for each in equation.invars]
        made = [f"{each.aval.str_short()}" for each in equation.outvars]
        asked = equation.primitive.name in _ASKS_FOR_A_LAYOUT
        said = _described(
            {key: value for key, value in equation.params.items() if key not in (_SAYS_NOTHING if asked else _SAYS_NO_MORE)}
        )
        hashed.update(f"{equation.primitive.name} {' '.join(read)} {' '.join(made)} {said}\n".encode())
        for variable in equation.outvars:
            number[variable] = len(number)
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                    _feed(hashed, getattr(inner, "jaxpr", inner))
    hashed.update(" ".join(str(each) if isinstance(each, core.Literal) else str(number[each]) for each in jaxpr.outvars).encode())


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
