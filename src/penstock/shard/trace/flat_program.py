"""A step function as a flat list of operations: what the planner looks at.

Nested programs are followed: what `jit`, `remat`, `custom_jvp` and the like call is written out in place, and the bodies of
`scan`, `while` and `cond` stand where they run, once, with the number of times they run. Values inside a body are *tied* to
those outside: tied values share one layout.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core

from penstock._jax import ClosedJaxpr, scan_counts
from penstock.shard.trace import flops
from penstock.shard.trace.rules import Rule, find_rule
from penstock.shard.unknown_costs import about_loops, about_operations

Path = tuple[int | str, ...]
"""Where an equation stands: its number in the step's jaxpr, then, for each nested program, the number in that."""

INLINED = {
    "jit": "jaxpr",
    "call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
"""Primitives that call a program on their own operands, and the parameter that holds it."""


@dataclass(frozen=True)
class Value:
    """An array in the program.

    Attributes:
      shape: of it.
      dtype: of it; that of random keys is an extended one.
      bytes: of the whole array.
    """

    shape: tuple[int, ...]
    dtype: Any
    bytes: int


@dataclass(frozen=True)
class Op:
    """An operation, with all that it reads and writes.

    Attributes:
      path: where it stands.
      primitive: its name.
      rule: which of its dimensions may be sharded.
      operands: numbers of values; None is a literal.
      results: numbers of values.
      count: how often it runs in a step.
      flops: of one run, on one device that computes all of it.
      fixed: layouts that the program itself prescribes, for a `sharding_constraint` or the boundary of a `shard_map`:
        of each operand, then of each result, one entry per dimension, a tuple of mesh axes or None where it is open.
      unknown: names of the primitives in it whose cost is unknown.
    """

    path: Path
    primitive: str
    rule: Rule
    operands: tuple[int | None, ...]
    results: tuple[int, ...]
    count: float
    flops: float
    fixed: tuple[tuple[tuple[str, ...] | None, ...], ...] | None = None
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class SameSharding:
    """Two values that share a layout: the dimensions of `inner` are those of `outer` after the first `skip`, which stay whole."""

    outer: int
    inner: int
    skip: int = 0


@dataclass(frozen=True)
class Loop:
    """The operations `start` to `end` (not included) are the body of a loop.

    `path` is where it stands; `operands` are the values from outside that it works on, None for literals; `made` are its
    results, which take their place when it starts; `passed` are the values that each turn begins with; `length` is how often
    it runs, None if that is unknown.
    """

    path: Path
    start: int
    end: int
    operands: tuple[int | None, ...]
    results: tuple[int, ...]
    carries: tuple[int, ...]
    length: int | None

    @property
    def read(self) -> tuple[int, ...]:
        """The operands that are values."""
        return tuple(each for each in self.operands if each is not None)


@dataclass
class FlatProgram:
    """A step, written out flat.

    Attributes:
      values: all arrays, numbered.
      ops: in the order in which they are written; a loop's body stands where the loop does.
      loops: the outer ones after those that they contain.
      ties: values inside of loops, and those outside that they come from or go to.
      inputs: the values that the step is given, in the order of its flattened arguments.
      constants: values that the step closes over.
      outputs: the values that it returns, flattened; None is a literal.
    """

    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    same_sharding: list[SameSharding] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    outputs: list[int | None] = field(default_factory=list)

    @property
    def unknown(self) -> tuple[str, ...]:
        """What is unknown of its FLOPs and of what it sends, a sentence each. Each counts places in the step."""
        loops = sum(loop.length is None for loop in self.loops)
        operations = Counter(name for op in self.ops for name in op.unknown)
        return (*about_loops(loops), *about_operations(operations, "one FLOP for each element of their results"))


def flatten(closed: ClosedJaxpr) -> FlatProgram:
    """Write a traced step out.

    Args:
      closed: of `jax.make_jaxpr(step)(*args)`.
    """
    program = FlatProgram()
    environment: dict[Any, int] = {}
    for variables, numbers in ((closed.jaxpr.constvars, program.constants), (closed.jaxpr.invars, program.inputs)):
        for variable in variables:
            environment[variable] = _new_value(program, variable.aval)
            numbers.append(environment[variable])
    _flatten_jaxpr(program, closed.jaxpr, environment, (), 1.0)
    program.outputs = [_read(environment, each) for each in closed.jaxpr.outvars]
    return program


def aval_bytes(aval: Any) -> int:
    """Return the bytes of a whole array; random keys count as what they are made of.

    Raises:
      TypeError: nothing tells the size of an element.
    """
    if not hasattr(aval, "shape"):  # a token, which only orders effects
        return 0
    if not jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended):
        return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize
    if not hasattr(aval.dtype, "itemsize"):
        raise TypeError(f"the step has an array of type {aval.dtype}, whose size is unknown; penstock plans keys and numbers")
    return math.prod(aval.shape) * aval.dtype.itemsize


def _new_value(program: FlatProgram, aval: Any) -> int:
    program.values.append(Value(tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None), aval_bytes(aval)))
    return len(program.values) - 1


def _read(environment: Mapping[Any, int], atom: Any) -> int | None:
    return None if isinstance(atom, core.Literal) else environment[atom]


def _flatten_jaxpr(program: FlatProgram, jaxpr: Any, environment: dict[Any, int], path: Path, count: float) -> None:
    for number, equation in enumerate(jaxpr.eqns):
        here = (*path, number)
        name = equation.primitive.name
        if name in INLINED and INLINED[name] in equation.params:
            _call(program, equation, environment, here, count)
        elif name == "scan":
            _scan(program, equation, environment, here, count)
        elif name == "while":
            _while(program, equation, environment, here, count)
        elif name == "cond":
            _cond(program, equation, environment, here, count)
        else:
            _operation(program, equation, environment, here, count)


def _operation(program: FlatProgram, equation: Any, environment: dict[Any, int], path: Path, count: float) -> None:
    operands = [each.aval for each in equation.invars]
    results = [each.aval for each in equation.outvars]
    for variable in equation.outvars:
        environment[variable] = _new_value(program, variable.aval)
    name = equation.primitive.name
    fixed = _prescribed_layouts(equation)
    rule = _independent_dims(operands, results) if name == "shard_map" else find_rule(name, equation.params, operands, results)
    program.ops.append(
        Op(
            path,
            name,
            rule,
            tuple(_read(environment, each) for each in equation.invars),
            tuple(environment[each] for each in equation.outvars),
            count,
            flops.of_equation(equation),
            fixed,
            flops.unknown_in(equation),
        )
    )


def find_meshes(jaxpr: Any) -> list[Any]:
    """The meshes, concrete or abstract, that a program itself names, in `with_sharding_constraint` and `shard_map`."""
    found: list[Any] = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "shard_map":
            found.append(equation.params["mesh"])
            continue  # What stands inside is on the devices' own parts.
        sharding = equation.params.get("sharding")
        if equation.primitive.name == "sharding_constraint" and isinstance(sharding, jax.sharding.NamedSharding):
            found.append(sharding.mesh)
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                    found += find_meshes(getattr(inner, "jaxpr", inner))
    return found


def _independent_dims(operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """A factor for each dimension of each operand and result: their layouts are prescribed one by one."""
    sizes: list[int] = []
    every: list[tuple[int, ...]] = []
    for each in (*operands, *results):
        every.append(tuple(range(len(sizes), len(sizes) + len(each.shape))))
        sizes.extend(each.shape)
    return Rule(tuple(sizes), tuple(every[: len(operands)]), tuple(every[len(operands) :]))


def _prescribed_layouts(equation: Any) -> tuple[tuple[tuple[str, ...] | None, ...], ...] | None:
    """What the program itself says of the layouts of an equation."""
    name = equation.primitive.name
    if name == "sharding_constraint":
        sharding = equation.params["sharding"]
        if not isinstance(sharding, jax.sharding.NamedSharding):
            return None
        dims = _spec_entries(sharding.spec, equation.outvars[0].aval.ndim)
        return (dims, dims)
    if name == "shard_map":
        specs = (*equation.params["in_specs"], *equation.params["out_specs"])
        atoms = (*equation.invars, *equation.outvars)
        return tuple(_spec_entries(spec, len(atom.aval.shape)) for spec, atom in zip(specs, atoms, strict=True))
    return None


def _spec_entries(spec: Any, rank: int) -> tuple[tuple[str, ...] | None, ...]:
    dims: list[tuple[str, ...] | None] = []
    for entry in (*spec, *(None,) * (rank - len(spec))):
        if entry is jax.sharding.PartitionSpec.UNCONSTRAINED:
            dims.append(None)
        elif entry is None:
            dims.append(())
        else:
            dims.append((entry,) if isinstance(entry, str) else tuple(entry))
    return tuple(dims)


def _open(jaxpr: Any) -> Any:
    """The open jaxpr, of an open or closed one."""
    return jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr


def _enter(program: FlatProgram, jaxpr: Any, operands: Sequence[int | None]) -> tuple[Any, dict[Any, int]]:
    inside = _open(jaxpr)
    environment: dict[Any, int] = {}
    for variable in inside.constvars:
        environment[variable] = _new_value(program, variable.aval)
        program.constants.append(environment[variable])
    for variable, operand in zip(inside.invars, operands, strict=True):
        environment[variable] = _new_value(program, variable.aval) if operand is None else operand
    return inside, environment


def _call(program: FlatProgram, equation: Any, environment: dict[Any, int], path: Path, count: float) -> None:
    operands = [_read(environment, each) for each in equation.invars]
    inside, inner = _enter(program, equation.params[INLINED[equation.primitive.name]], operands)
    _flatten_jaxpr(program, inside, inner, path, count)
    for variable, result in zip(equation.outvars, inside.outvars, strict=True):
        number = _read(inner, result)
        environment[variable] = _new_value(program, variable.aval) if number is None else number


def _scan(program: FlatProgram, equation: Any, environment: dict[Any, int], path: Path, count: float) -> None:
    """Carries are tied to what they start from and end as; slices [...] to the stack [length, ...] that they are taken from."""
    consts, carries = scan_counts(equation.params)
    outer = [_read(environment, each) for each in equation.invars]
    inside = _open(equation.params["jaxpr"])
    given: list[int | None] = list(outer[:consts])
    for number, variable in enumerate(inside.invars[consts:]):
        given.append(_new_value(program, variable.aval))
        _share_sharding(program, outer[consts + number], given[-1], skip=0 if number < carries else 1)
    inside, inner = _enter(program, equation.params["jaxpr"], given)
    start = len(program.ops)
    _flatten_jaxpr(program, inside, inner, (*path, "body"), count * equation.params["length"])
    end = len(program.ops)
    for number, (variable, result) in enumerate(zip(equation.outvars, inside.outvars, strict=True)):
        environment[variable] = _new_value(program, variable.aval)
        _share_sharding(program, environment[variable], _read(inner, result), skip=0 if number < carries else 1)
        if number < carries:
            _share_sharding(program, environment[variable], given[consts + number])
    _loop(program, equation, environment, path, (start, end), given[consts:], equation.params["length"])


def _while(program: FlatProgram, equation: Any, environment: dict[Any, int], path: Path, count: float) -> None:
    """How often it runs is unknown: it counts once, and `Program.unknown` says so."""
    of_condition, of_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    outer = [_read(environment, each) for each in equation.invars]
    carried = [_new_value(program, each.aval) for each in equation.outvars]
    for start, value in zip(outer[of_condition + of_body :], carried, strict=True):
        _share_sharding(program, start, value)
    begin = len(program.ops)
    inside, inner = _enter(program, equation.params["cond_jaxpr"], [*outer[:of_condition], *carried])
    _flatten_jaxpr(program, inside, inner, (*path, "cond"), count)
    inside, inner = _enter(program, equation.params["body_jaxpr"], [*outer[of_condition : of_condition + of_body], *carried])
    _flatten_jaxpr(program, inside, inner, (*path, "body"), count)
    for variable, value, result in zip(equation.outvars, carried, inside.outvars, strict=True):
        environment[variable] = _new_value(program, variable.aval)
        _share_sharding(program, environment[variable], value)
        _share_sharding(program, environment[variable], _read(inner, result))
    _loop(program, equation, environment, path, (begin, len(program.ops)), carried, None)


def _loop(
    program: FlatProgram,
    equation: Any,
    environment: Mapping[Any, int],
    path: Path,
    operations: tuple[int, int],
    carries: Sequence[int | None],
    length: int | None,
) -> None:
    operands = tuple(_read(environment, each) for each in equation.invars)
    results = tuple(environment[each] for each in equation.outvars)
    begin_with = tuple(each for each in carries if each is not None)
    program.loops.append(Loop(path, *operations, operands, results, begin_with, length))


def _cond(program: FlatProgram, equation: Any, environment: dict[Any, int], path: Path, count: float) -> None:
    """Each branch counts as often as if they took turns."""
    operands = [_read(environment, each) for each in equation.invars[1:]]
    for variable in equation.outvars:
        environment[variable] = _new_value(program, variable.aval)
    branches = equation.params["branches"]
    for number, branch in enumerate(branches):
        inside, inner = _enter(program, branch, operands)
        _flatten_jaxpr(program, inside, inner, (*path, f"branch{number}"), count / len(branches))
        for variable, result in zip(equation.outvars, inside.outvars, strict=True):
            _share_sharding(program, environment[variable], _read(inner, result))


def _share_sharding(program: FlatProgram, outer: int | None, inner: int | None, skip: int = 0) -> None:
    if outer is not None and inner is not None:
        program.same_sharding.append(SameSharding(outer, inner, skip))
