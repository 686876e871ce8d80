"""Rewrite a step so that it computes its gradients in parts of the batch, one after the other, and adds them up.

The step is traced twice: with its whole batch, and with one part of it. The equations with rows (`rows.py`) run in a loop over
the parts. A result of theirs that has no rows has to be a sum over rows, such as a gradient, or a mean before it is divided: the
sum over the parts is the result of the whole batch. All other equations run once, with the sums. All numbers in the program, such
as the number of rows by which a mean divides, are of the whole batch.

Results that need no products may also be computed once, for all rows: the number of rows that a mask keeps, or the rows in
another order. Random numbers are drawn for all rows in each part, which takes its own; the compiler makes those alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from penstock._jax import ClosedJaxpr
from penstock.errors import SplitError
from penstock.shard.trace.calls import CHECKPOINTS, find_call, held_jaxprs, nested_jaxprs, open_jaxpr
from penstock.shard.trace.flat_program import CONTRACTIONS
from penstock.shard.trace.lines import Atom, Line, Lines, ScanLoop, bind, is_literal, is_scan, read_atoms
from penstock.shard.trace.rows import Kind, Parts, Role, RowNumbers, Rows, avals_of, has_rows, role_of

_OTHER = "the program of a part of the batch has other operations than the program of the whole batch"


def split_batch(whole: ClosedJaxpr, part: ClosedJaxpr, count: int, groups: int = 1) -> ClosedJaxpr:
    """Return a step that runs in a number of parts of its batch.

    Args:
      whole, part: the jaxprs of the step with the whole batch, and with a part of it.
      groups: the number of groups of consecutive rows. A part has the same number of rows of each.

    Raises:
      SplitError: the results are not sums over rows, or not of these equations alone; the message says why, and names the line.
    """
    split = _Split.find(whole, _with_numbers_of(part, whole), Parts(count, groups))
    avals = [variable.aval for variable in whole.jaxpr.invars]
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals]
    return jax.make_jaxpr(split.run)(*arguments)


def _with_numbers_of(part: Any, whole: Any) -> Any:
    """Return the jaxpr of a part of the batch, open or closed, with the equations of the whole batch where they have no rows.

    The other equations have its literals.

    Raises:
      SplitError: the jaxprs differ in more than the sizes of arrays.
    """
    body, other = open_jaxpr(part), open_jaxpr(whole)
    if len(body.eqns) != len(other.eqns):
        raise SplitError(_OTHER)
    names: dict[Any, Any] = {}

    def define(own: Sequence[Any], theirs: Sequence[Any]) -> None:
        for variable, of_whole in zip(own, theirs, strict=True):
            if _rank_and_dtype(variable) != _rank_and_dtype(of_whole):
                raise SplitError(_OTHER)
            names[variable] = of_whole

    def merge(own: Sequence[Any], theirs: Sequence[Any]) -> list[Any]:
        for atom, of_whole in zip(own, theirs, strict=True):
            same = names.get(atom) is of_whole if not is_literal(atom) else is_literal(of_whole)
            if not same or (is_literal(atom) and atom.aval.shape != of_whole.aval.shape):
                raise SplitError(_OTHER)
        return [of_whole if is_literal(atom) else atom for atom, of_whole in zip(own, theirs, strict=True)]

    try:
        define((*body.constvars, *body.invars), (*other.constvars, *other.invars))
        made = []
        for equation, of_whole in zip(body.eqns, other.eqns, strict=True):
            if equation.primitive is not of_whole.primitive or equation.params.keys() != of_whole.params.keys():
                raise SplitError(_OTHER)
            operands = merge(equation.invars, of_whole.invars)
            define(equation.outvars, of_whole.outvars)
            sizes = avals_of((*equation.invars, *equation.outvars), (*of_whole.invars, *of_whole.outvars))
            differ = any(getattr(own, "shape", ()) != getattr(theirs, "shape", ()) for own, theirs in sizes)
            params = {key: _merge(value, of_whole.params[key], differ) for key, value in equation.params.items()}
            made.append(equation.replace(invars=operands, params=params))
        body = body.replace(eqns=made, outvars=merge(body.outvars, other.outvars))
        if not hasattr(part, "consts"):
            return body
        pairs = zip(part.consts, whole.consts, strict=True)
        return type(part)(body, [theirs if jnp.shape(theirs) == jnp.shape(own) else own for own, theirs in pairs])
    except ValueError as error:  # other numbers of operands
        raise error if isinstance(error, SplitError) else SplitError(_OTHER) from None


def _rank_and_dtype(variable: Any) -> tuple[int, Any]:
    return len(getattr(variable.aval, "shape", ())), getattr(variable.aval, "dtype", None)  # tokens have neither


def _merge(part: Any, whole: Any, differ: bool) -> Any:
    """Return a parameter of an equation. `differ` is whether the shapes of its operands or results do."""
    if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
        return _with_numbers_of(part, whole)
    if isinstance(part, tuple) and any(hasattr(each, "eqns") or hasattr(each, "jaxpr") for each in part):
        made = [_merge(own, theirs, differ) for own, theirs in zip(part, whole, strict=True)]
        return type(part)(*made) if hasattr(part, "_fields") else type(part)(made)
    return part if differ else whole


@dataclass
class _Split:
    """A step that runs in parts.

    Attributes:
      parts: how the batch is divided.
      lines, others: the program of one part, and of the whole batch. The same value has the same number.
      roles: the role of each value.
      once: values with rows, or over all rows, that are computed for the whole batch, first of all.
      whole: the equations that compute them, of the whole batch.
      first, inside, later: the other equations: before the loop over the parts, in it, and after it.
      columns: the indices in `inside` of equations whose indices have numbers of rows → the column of these, and their dimension.
    """

    parts: Parts
    lines: Lines
    others: Lines
    roles: dict[int, Role] = field(default_factory=dict)
    once: set[int] = field(default_factory=set)
    whole: list[Line] = field(default_factory=list)
    first: list[Line] = field(default_factory=list)
    inside: list[Line] = field(default_factory=list)
    later: list[Line] = field(default_factory=list)
    columns: dict[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def find(cls, whole: ClosedJaxpr, part: ClosedJaxpr, parts: Parts) -> _Split:
        """Find which equations run for each part, which before and which after."""
        found = cls(parts, Lines.of(part, ()), Lines.of(whole, ()))
        found._read_arguments(part, whole)
        outside = found._read_lines()
        found.whole = _with_sources(found.once, found.others)
        if any(line.equation.effects and found.once.isdisjoint(line.results) for line in found.whole):
            raise SplitError("what is computed for all rows at once depends on an operation with a side effect")
        needed = {atom for line in found.inside for atom in line.operands if not is_literal(atom)}
        for line in reversed(outside):
            if needed.isdisjoint(line.results):
                found.later.insert(0, line)
            else:
                needed.update(atom for atom in line.operands if not is_literal(atom))
                found.first.insert(0, line)
        return found

    def _read_arguments(self, part: ClosedJaxpr, whole: ClosedJaxpr) -> None:
        """Find the roles of the arguments, and of arrays that the step closes over."""
        for number, avals in zip(self.lines.inputs, avals_of(part.jaxpr.invars, whole.jaxpr.invars), strict=True):
            self.roles[number] = self.parts.in_order(*avals) or Kind.FIXED
        for number, own in self.lines.constants.items():
            self.roles[number] = self.parts.in_order(own, self.others.constants[number]) or Kind.FIXED

    def _read_lines(self) -> list[Line]:
        """Find the roles of all values, and return the equations outside of the loop."""
        cheap = set(self.roles)  # values that are computed without products
        outside: list[Line] = []
        rows = RowNumbers()
        for number in self.lines.constants:
            role = self.roles[number]
            if isinstance(role, Rows) and role.dim == 0:
                rows.read_constant(number, self.others.constants[number])
        for line, other in zip(self.lines.lines, self.others.lines, strict=True):
            operands = [role_of(atom, self.roles) for atom in line.operands]
            is_cheap = not _has_products(line) and cheap.issuperset(atom for atom in line.operands if not is_literal(atom))
            early = False
            found: list[Role] = []
            indexing = rows.of_indexing(line, operands)
            try:
                if indexing is not None:
                    role, column = indexing
                    found = [role]
                    indices = operands[1]
                    assert isinstance(indices, Rows)
                    self.columns[len(self.inside)] = column, indices.dim
                else:
                    found = self.parts.of_equation(line.equation, other.equation, operands, line.within)
                early = is_cheap and not {Kind.SUM, Kind.LEAST, Kind.GREATEST}.isdisjoint(found)
            except SplitError:
                if not is_cheap:
                    raise
                early = True
            if early:
                self.once.update(line.results)
                found = [
                    self.parts.in_order(*avals) or Kind.FIXED for avals in avals_of(line.equation.outvars, other.equation.outvars)
                ]
            elif has_rows(line.equation, other.equation):
                self.inside.append(line)
            else:
                outside.append(line)
            self.roles.update(zip(line.results, found, strict=True))
            rows.read(line, self.roles)
            cheap.update(line.results if is_cheap else ())
        return outside

    def run(self, *arguments: Any) -> list[Any]:
        """Return the flat results, given the flat arguments with the whole batch."""
        lines, roles = self.lines, self.roles
        given = dict(zip(lines.inputs, arguments, strict=True))
        environment: dict[int, Any] = {**self.others.constants, **given}
        _evaluate(self.whole, environment)
        environment = {**self.others.constants, **given, **{number: environment[number] for number in self.once}}
        used = {atom for line in self.inside for atom in line.operands if not is_literal(atom)}
        stacks = {
            number: _stack_parts(environment[number], role, self.parts.count)
            for number, role in roles.items()
            if isinstance(role, Rows) and number in used and number in environment
        }
        _evaluate(self.first, environment)
        made = {number for line in self.inside for number in line.results}
        read: set[Atom] = {atom for line in self.later for atom in line.operands if not is_literal(atom)}
        read |= {atom for atom in lines.outputs if not is_literal(atom)}
        sums = sorted(number for number in made & read if roles[number] is Kind.SUM)
        stacked = sorted((made & read).difference(sums))
        types = {
            result: variable.aval
            for line in self.inside
            for result, variable in zip(line.results, line.equation.outvars, strict=True)
        }

        def body(so_far: list[Any], part: tuple[Any, dict[int, Any]]) -> tuple[list[Any], list[Any]]:
            index, slices = part
            inner = {**environment, **slices}
            self._run_part(inner, index)
            added = [before + inner[number].astype(before.dtype) for number, before in zip(sums, so_far, strict=True)]
            return added, [inner[number] for number in stacked]

        zeros = [jnp.zeros(types[number].shape, _wide(types[number].dtype)) for number in sums]
        added, each = jax.lax.scan(body, zeros, (jnp.arange(self.parts.count), stacks))
        environment.update((number, value.astype(types[number].dtype)) for number, value in zip(sums, added, strict=True))
        environment.update((number, _join_parts(value, roles[number])) for number, value in zip(stacked, each, strict=True))
        _evaluate(self.later, environment)
        return read_atoms(environment, lines.outputs)

    def _run_part(self, environment: dict[int, Any], index: Any) -> None:
        """Evaluate the equations with rows for one part, given its number."""
        for at, line in enumerate(self.inside):
            operands = read_atoms(environment, line.operands)
            if at in self.columns:
                operands[1] = _with_row_numbers(operands[1], *self.columns[at])
            environment.update(zip(line.results, self._bind(line, operands, index), strict=True))

    def _bind(self, line: Line, operands: Sequence[Any], index: Any) -> Sequence[Any]:
        """Evaluate an equation for one part, and return its results."""
        equation, path = line.equation, line.path
        if id(equation) in self.parts.made:
            of_whole, rows = self.parts.made[id(equation)]
            *others, made = bind(replace(line, equation=of_whole), operands)
            return [*others, jax.lax.dynamic_index_in_dim(_stack_parts(made, rows, self.parts.count), index, keepdims=False)]
        if not self._makes_rows(equation):
            return bind(line, operands)

        def function(jaxpr: Any) -> Any:
            lines = Lines.of(jaxpr, path)
            return lambda *values: self._evaluate(lines, values, index)

        params = equation.params
        if is_scan(line):
            loop = ScanLoop(line)
            return loop.run(operands, lambda values: self._evaluate(loop.body, values, index))
        if equation.primitive.name == "cond":
            return jax.lax.switch(operands[0], list(map(function, params["branches"])), *operands[1:])
        if equation.primitive.name == "while":
            tests, consts = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
            test, body = function(params["cond_jaxpr"]), function(params["body_jaxpr"])
            return jax.lax.while_loop(
                lambda state: test(*operands[:tests], *state)[0],
                lambda state: body(*operands[tests:consts], *state),
                list(operands[consts:]),
            )
        call = find_call(equation)
        assert call is not None
        called = function(call.jaxpr)
        if equation.primitive.name in CHECKPOINTS:
            called = jax.checkpoint(called, prevent_cse=params["prevent_cse"], policy=params["policy"])
        return called(*(operands[at] for at in call.operands))

    def _evaluate(self, lines: Lines, values: Sequence[Any], index: Any) -> list[Any]:
        """Evaluate the jaxpr of a loop, a branch or a call for one part, and return its results."""
        environment = {**lines.constants, **dict(zip(lines.inputs, values, strict=True))}
        for line in lines.lines:
            results = self._bind(line, read_atoms(environment, line.operands), index)
            environment.update(zip(line.results, results, strict=True))
        return read_atoms(environment, lines.outputs)

    def _makes_rows(self, equation: Any) -> bool:
        """Return whether a jaxpr that an equation runs makes values that differ from row to row."""
        equations = [each for body in nested_jaxprs(equation) for each in body.eqns]
        return any(id(each) in self.parts.made or self._makes_rows(each) for each in equations)


def _has_products(line: Line) -> bool:
    name = line.equation.primitive.name
    return name in CONTRACTIONS or (not name.startswith("scatter") and any(True for _ in held_jaxprs(line.equation)))


def _with_sources(results: set[int], lines: Lines) -> list[Line]:
    """Return the lines that some values are computed from, in order."""
    needed = set(results)
    found: list[Line] = []
    for line in reversed(lines.lines):
        if not needed.isdisjoint(line.results):
            needed.update(atom for atom in line.operands if not is_literal(atom))
            found.insert(0, line)
    return found


def _wide(dtype: Any) -> Any:
    """Return the dtype in which parts are added up: float32 for shorter floats."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4 else dtype


def _evaluate(lines: Sequence[Line], environment: dict[int, Any]) -> None:
    for line in lines:
        environment.update(zip(line.results, bind(line, read_atoms(environment, line.operands)), strict=True))


def _with_row_numbers(indices: Any, column: int, dim: int) -> Any:
    """Return the indices of a gather or scatter with the numbers of the rows of one part in a column.

    >>> _with_row_numbers(jnp.array([[4, 7], [5, 8]]), 0, 0).tolist()
    [[0, 7], [1, 8]]
    """
    rows = jax.lax.broadcasted_iota(indices.dtype, indices.shape, dim)
    columns = jax.lax.broadcasted_iota(indices.dtype, indices.shape, indices.ndim - 1)
    return jnp.where(columns == column, rows, indices)


def _stack_parts(array: Any, rows: Rows, count: int) -> Any:
    """Return the parts of an array as a stack.

    >>> _stack_parts(jnp.arange(8), Rows(0, block=2), 2).tolist()
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    shape, dim = array.shape, rows.dim
    block = rows.block or shape[dim] // count
    groups = shape[dim] // (count * block)
    parts = jnp.reshape(array, (*shape[:dim], groups, count, block, *shape[dim + 1 :]))
    return jnp.reshape(jnp.moveaxis(parts, dim + 1, 0), (count, *shape[:dim], groups * block, *shape[dim + 1 :]))


def _join_parts(stack: Any, role: Role) -> Any:
    """Return the value for the whole batch of which a stack has the parts.

    >>> _join_parts(jnp.array([[0, 1, 4, 5], [2, 3, 6, 7]]), Rows(0, block=2)).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    if not isinstance(role, Rows):
        return stack.min(0) if role is Kind.LEAST else stack.max(0) if role is Kind.GREATEST else stack[0]
    count, shape, dim = stack.shape[0], stack.shape[1:], role.dim
    block = role.block or shape[dim]
    parts = jnp.reshape(stack, (count, *shape[:dim], shape[dim] // block, block, *shape[dim + 1 :]))
    return jnp.reshape(jnp.moveaxis(parts, 0, dim + 1), (*shape[:dim], shape[dim] * count, *shape[dim + 1 :]))
