"""Flatten the jaxpr of a step function into a `FlatProgram`.

Nested programs are inlined: those that `jit`, `remat`, `custom_jvp` and the like call, and the bodies of `scan`, `while` and
`cond`, once each, with the number of times they run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend import core

from penstock._jax import ClosedJaxpr, scan_counts
from penstock.shard.trace.flat_program import (
    CHECKPOINTS,
    DEBUG,
    INLINED,
    Carry,
    Conditional,
    FlatProgram,
    Loop,
    Op,
    Path,
    SameSharding,
    Value,
)
from penstock.shard.trace.flops import count_flops, find_unknown_costs
from penstock.shard.trace.prescribed_layouts import independent_dims, prescribed_layouts
from penstock.shard.trace.rules import find_rule


def flatten(closed: ClosedJaxpr) -> FlatProgram:
    """Flatten a traced step.

    Args:
      closed: the closed jaxpr that `jax.make_jaxpr(step)(*args)` returns.

    Returns:
      The program, with the sharding rule and the FLOPs of each operation.

    Raises:
      TypeError: an array has a dtype whose size is unknown.

    >>> program = flatten(jax.make_jaxpr(lambda x: jax.numpy.tanh(x).sum())(jax.ShapeDtypeStruct((4, 8), "float32")))
    >>> [op.primitive for op in program.ops]
    ['tanh', 'reduce_sum']
    """
    program = FlatProgram()
    environment: dict[Any, int] = {}
    for variables, numbers in ((closed.jaxpr.constvars, program.constants), (closed.jaxpr.invars, program.inputs)):
        for variable in variables:
            environment[variable] = _new_value(program, variable.aval)
            numbers.append(environment[variable])
    _flatten_jaxpr(program, closed.jaxpr, environment, _Place())
    program.outputs = [_read(environment, atom) for atom in closed.jaxpr.outvars]
    return program


def aval_bytes(aval: Any) -> int:
    """Return the bytes of a global array; a random key has those of the integers that it consists of.

    Args:
      aval: an abstract value.

    Raises:
      TypeError: the size of an element is unknown.
    """
    if not hasattr(aval, "shape"):  # A token, which only orders effects.
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
    """Return the index of the value of a variable, or None for a literal."""
    return None if isinstance(atom, core.Literal) else environment[atom]


@dataclass(frozen=True)
class _Place:
    """Where an equation or a jaxpr stands.

    Attributes:
      path: its position.
      count: how often it runs in a step.
      region: the path of the innermost `jax.checkpoint` around it.
      sources: as in `Op`.
    """

    path: Path = ()
    count: float = 1.0
    region: Path = ()
    sources: tuple[Any, ...] = ()

    def inside(self, part: int | str, times: float = 1.0) -> _Place:
        """Return the place of a part that runs `times` as often."""
        return replace(self, path=(*self.path, part), count=self.count * times)


def _flatten_jaxpr(program: FlatProgram, jaxpr: Any, environment: dict[Any, int], place: _Place) -> None:
    """Append the operations of a jaxpr to the program.

    Args:
      program: the program to append to.
      jaxpr: an open jaxpr.
      environment: variable → index of its value; extended here.
      place: where the jaxpr stands.
    """
    for index, equation in enumerate(jaxpr.eqns):
        here = replace(place, path=(*place.path, index), sources=(equation.source_info, *place.sources))
        name = equation.primitive.name
        if name in DEBUG:
            continue
        if name in INLINED and INLINED[name] in equation.params:
            _inline_call(program, equation, environment, replace(here, region=here.path) if name in CHECKPOINTS else here)
        elif name == "scan":
            _inline_scan(program, equation, environment, here)
        elif name == "while":
            _inline_while(program, equation, environment, here)
        elif name == "cond":
            _inline_cond(program, equation, environment, here)
        else:
            _append_op(program, equation, environment, here)


def _append_op(program: FlatProgram, equation: Any, environment: dict[Any, int], place: _Place) -> None:
    operands = [atom.aval for atom in equation.invars]
    results = [variable.aval for variable in equation.outvars]
    for variable in equation.outvars:
        environment[variable] = _new_value(program, variable.aval)
    name = equation.primitive.name
    fixed = prescribed_layouts(equation)
    rule = independent_dims(operands, results) if name == "shard_map" else find_rule(name, equation.params, operands, results)
    program.ops.append(
        Op(
            place.path,
            name,
            rule,
            tuple(_read(environment, atom) for atom in equation.invars),
            tuple(environment[variable] for variable in equation.outvars),
            place.count,
            count_flops(equation),
            fixed,
            find_unknown_costs(equation),
            place.region,
            _is_rounded(equation),
            place.sources,
        )
    )


def _is_rounded(equation: Any) -> bool:
    """Return whether a TPU rounds the float32 operands of an equation to bfloat16: of products, unless more is asked for."""
    precision = equation.params.get("precision", jax.lax.Precision.HIGHEST)
    each = precision if isinstance(precision, tuple) else (precision,)
    return all(one in (None, jax.lax.Precision.DEFAULT, jax.lax.DotAlgorithmPreset.DEFAULT) for one in each)


def _open_jaxpr(jaxpr: Any) -> Any:
    """Return the open jaxpr of an open or closed one."""
    return jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr


def _bind_operands(program: FlatProgram, jaxpr: Any, operands: Sequence[int | None]) -> tuple[Any, dict[Any, int]]:
    """Return the open jaxpr, and an environment that maps its arguments to the given operands."""
    body = _open_jaxpr(jaxpr)
    environment: dict[Any, int] = {}
    for variable in body.constvars:
        environment[variable] = _new_value(program, variable.aval)
        program.constants.append(environment[variable])
    for variable, operand in zip(body.invars, operands, strict=True):
        environment[variable] = _new_value(program, variable.aval) if operand is None else operand
    return body, environment


def _inline_call(program: FlatProgram, equation: Any, environment: dict[Any, int], place: _Place) -> None:
    operands = [_read(environment, atom) for atom in equation.invars]
    body, inner = _bind_operands(program, equation.params[INLINED[equation.primitive.name]], operands)
    _flatten_jaxpr(program, body, inner, place)
    for variable, result in zip(equation.outvars, body.outvars, strict=True):
        value = _read(inner, result)
        environment[variable] = _new_value(program, variable.aval) if value is None else value


def _inline_scan(program: FlatProgram, equation: Any, environment: dict[Any, int], place: _Place) -> None:
    """Append the body of a scan, which counts `length` times.

    A carry has the sharding of its initial and its final value. A slice [...] has that of the stack [length, ...].
    """
    consts, carried = scan_counts(equation.params)
    length = equation.params["length"]
    outer = [_read(environment, atom) for atom in equation.invars]
    body = _open_jaxpr(equation.params["jaxpr"])
    own = [_new_value(program, variable.aval) for variable in body.invars[consts:]]
    for index, (outside, value) in enumerate(zip(outer[consts:], own, strict=True)):
        _share_sharding(program, outside, value, skip=0 if index < carried else 1)
    body, inner = _bind_operands(program, equation.params["jaxpr"], [*outer[:consts], *own])
    start = len(program.ops)
    _flatten_jaxpr(program, body, inner, place.inside("body", length))
    carries, stacks = [], []
    for index, (variable, atom) in enumerate(zip(equation.outvars, body.outvars, strict=True)):
        result = environment[variable] = _new_value(program, variable.aval)
        after = _read(inner, atom)
        _share_sharding(program, result, after, skip=0 if index < carried else 1)
        if index < carried:
            _share_sharding(program, result, own[index])
            carries.append(Carry(outer[consts + index], own[index], after, result))
        else:
            stacks.append((after, result))
    slices = tuple(zip(outer[consts + carried :], own[carried:], strict=True))
    operands = tuple(outer)
    program.loops.append(Loop(place.path, start, len(program.ops), operands, length, tuple(carries), slices, tuple(stacks)))


def _inline_while(program: FlatProgram, equation: Any, environment: dict[Any, int], place: _Place) -> None:
    """Append the condition and the body of a while loop. They count once, and `FlatProgram.unknown` reports this."""
    cond_consts, body_consts = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    outer = [_read(environment, atom) for atom in equation.invars]
    own = [_new_value(program, variable.aval) for variable in equation.outvars]
    initial = outer[cond_consts + body_consts :]
    for outside, value in zip(initial, own, strict=True):
        _share_sharding(program, outside, value)
    start = len(program.ops)
    body, inner = _bind_operands(program, equation.params["cond_jaxpr"], [*outer[:cond_consts], *own])
    _flatten_jaxpr(program, body, inner, place.inside("cond"))
    operands = [*outer[cond_consts : cond_consts + body_consts], *own]
    body, inner = _bind_operands(program, equation.params["body_jaxpr"], operands)
    _flatten_jaxpr(program, body, inner, place.inside("body"))
    carries = []
    for variable, outside, before, atom in zip(equation.outvars, initial, own, body.outvars, strict=True):
        result = environment[variable] = _new_value(program, variable.aval)
        after = _read(inner, atom)
        _share_sharding(program, result, before)
        _share_sharding(program, result, after)
        carries.append(Carry(outside, before, after, result))
    program.loops.append(Loop(place.path, start, len(program.ops), tuple(outer), None, tuple(carries)))


def _inline_cond(program: FlatProgram, equation: Any, environment: dict[Any, int], place: _Place) -> None:
    """Append the branches of a cond. Each counts 1 / (number of branches), as if all ran equally often."""
    operands = [_read(environment, atom) for atom in equation.invars[1:]]
    for variable in equation.outvars:
        environment[variable] = _new_value(program, variable.aval)
    branches = equation.params["branches"]
    start = len(program.ops)
    results = []
    for index, branch in enumerate(branches):
        body, inner = _bind_operands(program, branch, operands)
        _flatten_jaxpr(program, body, inner, place.inside(f"branch{index}", 1 / len(branches)))
        for variable, atom in zip(equation.outvars, body.outvars, strict=True):
            result = _read(inner, atom)
            _share_sharding(program, environment[variable], result)
            results.append((result, environment[variable], len(program.ops)))
    program.conditionals.append(Conditional(start, len(program.ops), tuple(results)))


def _share_sharding(program: FlatProgram, outer: int | None, inner: int | None, skip: int = 0) -> None:
    """Add a same-sharding constraint, unless one of the values is a literal."""
    if outer is not None and inner is not None:
        program.same_sharding.append(SameSharding(outer, inner, skip))
