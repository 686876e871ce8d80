"""Rewrite a step so that its backward pass computes values of its forward pass again, instead of keeping them in memory.

This is what `jax.checkpoint` does (Chen et al. 2016, arXiv:1604.06174), for any set of values, after the step was differentiated.
A *scope* is a jaxpr that has a forward and a backward pass: the step, or the body of a loop over microbatches. The equations of
its backward pass read a *copy* of each value that is not kept. A copy is computed before its first reader, from kept values and
other copies. It is behind a barrier with the other operands of this reader, so that the compiler can neither merge it with the
value of the forward pass nor compute it early.

A loop over layers writes the values that its backward loop reads into stacks. If such a value is computed again, the forward loop
does not stack it. The backward loop computes it in each iteration, from slices of what the forward loop reads and stacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from penstock._jax import ClosedJaxpr
from penstock.shard.trace.calls import LOOP_BODIES, find_call, open_jaxpr
from penstock.shard.trace.flat_program import Path
from penstock.shard.trace.lines import Atom, Line, Lines, ScanLoop, bind, is_literal, is_scan, read_atoms

Place = tuple[Path, int]
"""The path of an equation and the number of one of its results."""


@dataclass(frozen=True)
class Recomputation:
    """The values of a scope that are computed again.

    Attributes:
      scope: the path of the scope: () for the step, or the path of the body of a loop.
      backward: the path of the first equation of its backward pass, which is an equation of the scope itself or of a jaxpr that
        it calls.
      values: places of values of the forward pass: in the scope, or in the body of a scan in it.
    """

    scope: Path
    backward: Path
    values: tuple[Place, ...]


def recompute(closed: ClosedJaxpr, recomputations: Iterable[Recomputation]) -> ClosedJaxpr:
    """Return a closed jaxpr that computes values again, with the same arguments and results.

    A value is kept nevertheless if a result of the scope is this value, or if its stack is read in another way than by a scan
    over as many slices.

    >>> step = lambda x: jax.grad(lambda x: jax.numpy.sin(jax.numpy.sin(x)).sum())(x)
    >>> closed = jax.make_jaxpr(step)(jax.ShapeDtypeStruct((8,), "float32"))
    >>> [equation.primitive.name for equation in closed.jaxpr.eqns]
    ['sin', 'cos', 'sin', 'cos', 'reduce_sum', 'broadcast_in_dim', 'mul', 'mul']
    >>> again = recompute(closed, [Recomputation((), (5,), (((0,), 0), ((1,), 0), ((3,), 0)))])
    >>> [equation.primitive.name for equation in again.jaxpr.eqns][5:]
    ['broadcast_in_dim', 'optimization_barrier', 'sin', 'cos', 'mul', 'optimization_barrier', 'cos', 'mul']
    """
    scopes = {each.scope: each for each in recomputations if each.values}
    if not scopes:
        return closed
    arguments = [_abstract(variable) for variable in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *flat: _evaluate(closed, flat, (), scopes))(*arguments)


def _abstract(variable: Any) -> jax.ShapeDtypeStruct:
    aval = variable.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def backward_paths(jaxpr: Any, path: Path = ()) -> set[Path]:
    """Return the paths (`FlatProgram`) of the outermost equations of a backward pass."""
    found: set[Path] = set()
    for index, equation in enumerate(jaxpr.eqns):
        here = (*path, index)
        name, params = equation.primitive.name, equation.params
        if "transpose(" in str(equation.source_info.name_stack):  # such as transpose(jvp(loss))
            found.add(here)
        elif name == "cond":
            for number, branch in enumerate(params["branches"]):
                found |= backward_paths(branch.jaxpr, (*here, f"branch{number}"))
        elif name in LOOP_BODIES:
            for key, part in LOOP_BODIES[name].items():
                found |= backward_paths(params[key].jaxpr, (*here, part))
        elif (call := find_call(equation)) is not None:
            found |= backward_paths(open_jaxpr(call.jaxpr), here)
    return found


# Evaluate a scope


Scopes = Mapping[Path, Recomputation]
"""The path of each scope → what it computes again."""


def _evaluate(jaxpr: Any, args: Sequence[Any], path: Path, scopes: Scopes) -> list[Any]:
    """Evaluate a jaxpr, in which values are computed again in some scopes, and return its results."""
    lines = Lines.of(jaxpr, path)
    environment = {**lines.constants, **dict(zip(lines.inputs, args, strict=True))}
    if path in scopes:
        return _Scope(lines, scopes[path], environment).evaluate(scopes)
    for line in lines.lines:
        _bind(line, read_atoms(environment, line.operands), environment, scopes)
    return read_atoms(environment, lines.outputs)


def _bind(line: Line, operands: Sequence[Any], environment: dict[int, Any], scopes: Scopes) -> None:
    """Evaluate an equation, and put its results into the environment."""
    if is_scan(line) and any(scope[: len(line.path)] == line.path for scope in scopes):
        loop = ScanLoop(line)
        body = (*line.path, "body")
        results = loop.run(operands, lambda values: _evaluate(loop.jaxpr, values, body, scopes))
    else:
        results = list(bind(line, operands))
    environment.update(zip(line.results, results, strict=True))


@dataclass
class _Again:
    """The values of a forward loop that a backward loop computes again.

    Attributes:
      forward: the index of the forward loop among the lines of the scope.
      values: index of an operand of the backward loop, whose slices are computed again → value in the body of the forward loop.
      lines: the lines of this body that are evaluated again, in order.
      sources: value of this body that is read and not computed again → the operand of the forward loop that it is (a constant or
        a slice), or None if the forward loop stacks it.
    """

    forward: int
    values: dict[int, int]
    lines: list[Line]
    sources: dict[int, int | None]


class _Scope:
    """The evaluation of a scope.

    Args:
      environment: the values of its arguments and constants.
    """

    def __init__(self, lines: Lines, recomputation: Recomputation, environment: dict[int, Any]):
        self._lines, self._outputs, self._environment = lines.lines, lines.outputs, environment
        index_of = {line.path: index for index, line in enumerate(self._lines)}
        self._backward = index_of[recomputation.backward]
        self._maker = {result: index for index, line in enumerate(self._lines) for result in line.results}
        self._loops = {index: ScanLoop(line) for index, line in enumerate(self._lines) if is_scan(line)}
        self._chosen: set[int] = set()
        self._inside: dict[int, set[int]] = {index: set() for index in self._loops}
        paths_in = {index: {line.path: line for line in loop.body.lines} for index, loop in self._loops.items()}
        for path, result in recomputation.values:
            if path in index_of:
                if index_of[path] < self._backward:
                    self._chosen.add(self._lines[index_of[path]].results[result])
                continue
            for index, lines_in in paths_in.items():
                if path in lines_in and index < self._backward:
                    self._inside[index].add(lines_in[path].results[result])
        self._copies: dict[int, Any] = {}  # value → the value that was computed again
        self._stacks: dict[int, dict[int, Any]] = {}  # forward loop → value in its body → its stack
        self._again = self._find_loops()

    def evaluate(self, scopes: Scopes) -> list[Any]:
        """Evaluate the scope and return its results."""
        rewritten = {one.forward for each in self._again.values() for one in each}
        for index, line in enumerate(self._lines):
            forward = index < self._backward
            operands = read_atoms(self._environment, line.operands) if forward else self._read_backward(index, scopes)
            if index in rewritten:
                self._run_forward(index, operands, scopes)
            elif index in self._again:
                self._run_backward(index, operands, scopes)
            else:
                _bind(line, operands, self._environment, scopes)
        return read_atoms(self._environment, self._outputs)

    def _read_backward(self, index: int, scopes: Scopes) -> list[Any]:
        """Return the operands of an equation of the backward pass; those that it does not read are None."""
        operands = self._lines[index].operands
        again = self._again.get(index, ())
        unread = {number for each in again for number in each.values}
        read = [atom for number, atom in enumerate(operands) if number not in unread and not is_literal(atom)]
        outside = [
            (self._loops[each.forward].line.operands[source])
            for each in again
            for source in each.sources.values()
            if source is not None
        ]
        read += [atom for atom in outside if not is_literal(atom)]
        if any(atom in self._chosen and atom not in self._copies for atom in read):
            self._copy(read, scopes)
        return [None if number in unread else self._read_copy(atom) for number, atom in enumerate(operands)]

    def _read_copy(self, atom: Atom) -> Any:
        """Return a value as the backward pass reads it."""
        if is_literal(atom):
            return atom.val
        return self._copies[atom] if atom in self._copies else self._environment[atom]

    def _copy(self, read: Iterable[int], scopes: Scopes) -> None:
        """Compute values again that an equation reads, behind a barrier with the other values that it reads.

        Values behind the barrier are from now on read there, so that a weight is gathered once for the copies and the equation.
        """
        needed: set[int] = set()
        leaves: dict[int, None] = {}
        queue = list(read)
        while queue:
            value = queue.pop()
            if value in self._chosen and value not in self._copies:
                if self._maker[value] not in needed:
                    needed.add(self._maker[value])
                    queue += [atom for atom in self._lines[self._maker[value]].operands if not is_literal(atom)]
            elif not jax.numpy.issubdtype(self._read_copy(value).dtype, jax.dtypes.extended):
                leaves[value] = None
        behind = jax.lax.optimization_barrier([self._read_copy(value) for value in leaves])
        self._copies.update(zip(leaves, behind, strict=True))
        for index in sorted(needed):
            line = self._lines[index]
            again: dict[int, Any] = {}
            _bind(line, [self._read_copy(atom) for atom in line.operands], again, scopes)
            self._copies.update((result, again[result]) for result in line.results if result in self._chosen)

    # Loops

    def _stacks_of(self, operand: Atom) -> tuple[int, int] | None:
        """Return the loop before the backward pass of which a value is a stack, and the index of the result."""
        index = None if is_literal(operand) else self._maker.get(operand)
        if index not in self._loops or index >= self._backward:
            return None
        number = self._lines[index].results.index(operand)
        return (index, number) if number >= self._loops[index].carries else None

    def _find_loops(self) -> dict[int, list[_Again]]:
        """Return, for each backward loop, what it computes again of forward loops."""
        sliced: dict[int, list[tuple[int, int, int]]] = {}  # backward loop → (its operand, forward loop, value inside)
        for index, loop in self._loops.items():
            if index < self._backward:
                continue
            for number, operand in enumerate(loop.line.operands):
                if number < loop.first_slice or (found := self._stacks_of(operand)) is None:
                    continue
                forward = self._loops[found[0]]
                value = forward.body.outputs[found[1]]
                if not is_literal(value) and value in self._inside[found[0]] and forward.length == loop.length:
                    sliced.setdefault(index, []).append((number, found[0], value))
        self._keep_what_others_read({(index, number) for index, each in sliced.items() for number, _, _ in each})
        again: dict[int, list[_Again]] = {}
        for index, each in sliced.items():
            for source in sorted({source for _, source, _ in each}):
                values = {number: value for number, at, value in each if at == source and value in self._inside[source]}
                if values:
                    again.setdefault(index, []).append(self._trace_back(source, values))
        return again

    def _keep_what_others_read(self, sliced: set[tuple[int, int]]) -> None:
        """Keep the values whose stacks the backward pass reads in another way than by the given operands of loops."""
        others = [
            atom
            for index, line in enumerate(self._lines)
            if index >= self._backward
            for number, atom in enumerate(line.operands)
            if (index, number) not in sliced
        ]
        for atom in (*others, *self._outputs):
            if (found := self._stacks_of(atom)) is not None:
                value = self._loops[found[0]].body.outputs[found[1]]
                self._inside[found[0]].discard(value)

    def _trace_back(self, forward: int, values: dict[int, int]) -> _Again:
        """Return how values in the body of a forward loop are computed again."""
        loop = self._loops[forward]
        body, chosen = loop.body, self._inside[forward]
        maker = {result: index for index, line in enumerate(body.lines) for result in line.results}
        needed, sources = set(), {}
        queue = list(values.values())
        arguments = {value: index for index, value in enumerate(body.inputs)}
        while queue:
            value = queue.pop()
            if value in chosen:
                if maker[value] not in needed:
                    needed.add(maker[value])
                    queue += [atom for atom in body.lines[maker[value]].operands if not is_literal(atom)]
            elif value not in body.constants:
                argument = arguments.get(value)
                carried = argument is None or loop.consts <= argument < loop.first_slice
                sources[value] = None if carried else argument
        return _Again(forward, values, [body.lines[index] for index in sorted(needed)], sources)

    def _run_forward(self, index: int, operands: list[Any], scopes: Scopes) -> None:
        """Run a loop of the forward pass without stacks that nothing reads, and with those that the backward pass needs."""
        loop, line = self._loops[index], self._lines[index]
        dropped = {(at, number) for at, each in self._again.items() for one in each for number in one.values}
        read = {
            atom
            for at, other in enumerate(self._lines)
            for number, atom in enumerate(other.operands)
            if (at, number) not in dropped and not is_literal(atom)
        }
        read |= {atom for atom in self._outputs if not is_literal(atom)}
        kept = [number for number in range(loop.carries, len(line.results)) if line.results[number] in read]
        stacked = {
            loop.body.outputs[number]: line.results[number] for number in kept if not is_literal(loop.body.outputs[number])
        }
        wanted = {
            value
            for each in self._again.values()
            for one in each
            if one.forward == index
            for value, source in one.sources.items()
            if source is None
        }
        new = sorted(wanted - stacked.keys())

        def body(values: list[Any]) -> list[Any]:
            inner = {**loop.body.constants, **dict(zip(loop.body.inputs, values, strict=True))}
            for each in loop.body.lines:
                _bind(each, read_atoms(inner, each.operands), inner, scopes)
            results = read_atoms(inner, loop.body.outputs)
            return [*results[: loop.carries], *(results[number] for number in kept), *read_atoms(inner, new)]

        results = loop.run(operands, body)
        numbers = [*range(loop.carries), *kept]
        self._environment.update({line.results[number]: result for number, result in zip(numbers, results, strict=False)})
        self._stacks[index] = {value: self._environment[at] for value, at in stacked.items()}
        self._stacks[index].update(zip(new, results[len(numbers) :], strict=True))

    def _run_backward(self, index: int, operands: list[Any], scopes: Scopes) -> None:
        """Run a loop of the backward pass that computes values again. Operands that it does not read are None."""
        loop, line = self._loops[index], self._lines[index]
        dropped = {number for each in self._again[index] for number in each.values}
        extra: list[Any] = []  # stacks of which it reads slices
        fixed: list[dict[int, Any]] = []  # for each forward loop: constants of its body
        slots: list[dict[int, int]] = []  # for each forward loop: value → its number in `extra`
        for each in self._again[index]:
            forward = self._loops[each.forward]
            constants, places = dict(forward.body.constants), {}
            for value, source in each.sources.items():
                if source is not None and source < forward.consts:
                    constants[value] = self._read_copy(forward.line.operands[source])
                    continue
                places[value] = len(extra)
                extra.append(
                    self._stacks[each.forward][value] if source is None else self._read_copy(forward.line.operands[source])
                )
            fixed.append(constants)
            slots.append(places)
        kept = [number for number in range(len(operands)) if number not in dropped]
        given = [operands[number] for number in kept]

        def body(values: list[Any]) -> list[Any]:
            arguments = dict(zip(kept, values, strict=False))
            sliced = values[len(kept) :]
            for each, constants, places in zip(self._again[index], fixed, slots, strict=True):
                inner = {**constants, **{value: sliced[number] for value, number in places.items()}}
                for one in each.lines:
                    _bind(one, read_atoms(inner, one.operands), inner, {})
                arguments.update({number: inner[value] for number, value in each.values.items()})
            return _evaluate(loop.jaxpr, [arguments[number] for number in range(len(operands))], (*line.path, "body"), scopes)

        self._environment.update(zip(line.results, loop.run(given, body, extra), strict=True))
