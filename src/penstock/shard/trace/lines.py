"""A jaxpr as a list of lines, to be evaluated in another order or more than once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core

from penstock._jax import from_source, scan_counts
from penstock.shard.trace.calls import PLAIN_CALLS, find_call, open_jaxpr
from penstock.shard.trace.flat_program import Path

Atom = Any
"""The number of a value, or a `Literal`."""


def is_literal(atom: Atom) -> bool:
    """Return whether an operand is a literal."""
    return isinstance(atom, core.Literal)


@dataclass
class Line:
    """An equation of a jaxpr or of a jaxpr that it calls.

    Attributes:
      path: its path.
      equation: the equation.
      operands: the number of the value of each operand, or a literal.
      results: the numbers of its results.
      within: the sources of the calls that it is in, the innermost first.
    """

    path: Path
    equation: Any
    operands: list[Atom]
    results: list[int]
    within: tuple[Any, ...] = ()


@dataclass
class Lines:
    """The equations of a jaxpr and of the jaxprs that it calls, in order. Values have numbers.

    Attributes:
      lines: the equations.
      inputs: the numbers of the arguments.
      outputs: the numbers of the results, or literals.
      constants: number → value of a constant.
      count: the number of values.
    """

    lines: list[Line] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[Atom] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    count: int = 0

    @classmethod
    def of(cls, jaxpr: Any, path: Path) -> Lines:
        """Return the lines of a jaxpr, open or closed; an open one has its constants as first arguments."""
        found = cls()
        body = open_jaxpr(jaxpr)
        names: dict[Any, Atom] = {variable: found.new() for variable in (*body.constvars, *body.invars)}
        numbers = list(names.values())
        consts = getattr(jaxpr, "consts", ())
        found.constants.update(zip(numbers, consts, strict=False))
        found.inputs = numbers[len(consts) :]
        found.outputs = found._append(body, names, path, ())
        return found

    def new(self) -> int:
        self.count += 1
        return self.count - 1

    def _append(self, jaxpr: Any, names: dict[Any, Atom], path: Path, within: tuple[Any, ...]) -> list[Atom]:
        """Append the equations of an open jaxpr, and return its results."""

        def read(atom: Any) -> Atom:
            return atom if is_literal(atom) else names[atom]

        for number, equation in enumerate(jaxpr.eqns):
            here = (*path, number)
            call = find_call(equation) if equation.primitive.name in PLAIN_CALLS else None
            if call is None:
                results = [self.new() for _ in equation.outvars]
                self.lines.append(Line(here, equation, list(map(read, equation.invars)), results, within))
            else:
                body = open_jaxpr(call.jaxpr)
                inner: dict[Any, Atom] = dict(zip(body.invars, (read(equation.invars[at]) for at in call.operands), strict=True))
                for variable, value in zip(body.constvars, call.consts, strict=True):
                    inner[variable] = self.new()
                    self.constants[inner[variable]] = value
                results = self._append(body, inner, here, (equation.source_info, *within))
            names.update(zip(equation.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))


def read_atoms(environment: Mapping[int, Any], atoms: Iterable[Atom]) -> list[Any]:
    """Return the values of operands."""
    return [atom.val if is_literal(atom) else environment[atom] for atom in atoms]


def bind(line: Line, operands: Sequence[Any]) -> Sequence[Any]:
    """Evaluate an equation, and return its results."""
    equation = line.equation
    with from_source(equation):
        results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
    return results if equation.primitive.multiple_results else [results]


def is_scan(line: Line) -> bool:
    return line.equation.primitive.name == "scan"


class ScanLoop:
    """A scan: its body, and which of its operands and results are constants, carries and slices."""

    def __init__(self, line: Line):
        self.line, self.params = line, line.equation.params
        self.consts, self.carries = scan_counts(self.params)
        self.length, self.jaxpr = self.params["length"], self.params["jaxpr"]
        self.body = Lines.of(self.jaxpr, (*line.path, "body"))

    @property
    def first_slice(self) -> int:
        """Return the index of the first operand, and argument of the body, that is sliced."""
        return self.consts + self.carries

    def run(self, operands: Sequence[Any], body: Any, slices: Sequence[Any] = (), kept: Sequence[int] | None = None) -> list[Any]:
        """Run a scan with another body, and return the final carries, then the stacks.

        Args:
          operands: as of the equation.
          body: a function from a list of the arguments of the body, followed by slices of `slices`, to a list of results.
        """
        consts, carried = list(operands[: self.consts]), list(operands[self.consts : self.first_slice])
        stacks = [*operands[self.first_slice :], *slices]

        def step(carry: list[Any], sliced: list[Any]) -> tuple[list[Any], list[Any]]:
            results = body([*consts, *carry, *sliced])
            return results[: self.carries], results[self.carries :]

        settings = {key: self.params[key] for key in ("length", "reverse", "unroll")}
        with from_source(self.line.equation):
            last, made = jax.lax.scan(step, carried, stacks, **settings)
        return [*last, *made]
