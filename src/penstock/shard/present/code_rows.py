"""List the sharding constraints of a plan, and write them as rows of the printed code (`plain_jax.Row`).

The operations are numbered in the order in which `plain_jax.Evaluation` evaluates them. It evaluates the step as the user wrote
it, while a plan has the paths of a jaxpr whose consecutive sums are merged (`merge_sums`). So both jaxprs are followed here.
"""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.shard.apply.sharding_constraints import ShardingConstraints, Spec
from penstock.shard.present.plain_jax import INLINED, NESTED, describe, held_jaxprs
from penstock.shard.trace.calls import LOOP_BODIES, open_jaxpr
from penstock.shard.trace.flat_program import Path
from penstock.shard.trace.source_lines import describe_source, source_text
from penstock.shard.trace.step import TracedStep

COLUMNS = 130
"""The longest line of the printed code."""

Layouts = tuple[tuple[int, tuple[Spec, ...]], ...]
"""(number of an operand or a result, the layouts to request one after the other), for those that have some."""


@dataclass(frozen=True)
class CodeRow:
    """The layouts of operations of one form, as `plain_jax.Row`, and the lines of the user's code that make them.

    Attributes:
      operation, operands, results, numbers, of: as in `plain_jax.Row`.
      lines: such as "model.py:42 (block): h = x @ w", in the order of evaluation.
    """

    operation: str
    operands: Layouts
    results: Layouts
    numbers: tuple[int, ...]
    of: int
    lines: tuple[str, ...]


@dataclass
class _Operation:
    """An equation of the step, in the order of evaluation, with the layouts of the plan."""

    equation: Any
    sources: tuple[Any, ...]
    operands: Layouts = ()
    results: Layouts = ()


def find_rows(traced: TracedStep, constraints: ShardingConstraints) -> tuple[list[CodeRow], list[str]]:
    """Return the rows of a plan, and the lines inside of operations that the printed code does not enter, such as linear solves.

    Operations of one form that all have the same layouts have one row without numbers.
    """
    visit = _Visit(constraints)
    visit.follow(traced.unmerged.jaxpr, traced.closed.jaxpr, (), ())
    forms: dict[str, list[_Operation]] = {}
    for each in visit.operations:
        forms.setdefault(describe(each.equation), []).append(each)
    rows: dict[tuple[str, Layouts, Layouts], list[int]] = {}
    for each in visit.operations:  # in the order in which each row is first needed
        if each.operands or each.results:
            rows.setdefault((describe(each.equation), each.operands, each.results), [])
    for form, operations in forms.items():
        for number, each in enumerate(operations):
            if (key := (form, each.operands, each.results)) in rows:
                rows[key].append(number)
    made = []
    for (form, operands, results), numbers in rows.items():
        count = len(forms[form])
        every = len(numbers) == count
        lines = _lines(forms[form][number].sources for number in numbers)
        made.append(CodeRow(form, operands, results, () if every else tuple(numbers), 0 if every else count, lines))
    return made, list(_lines(op.sources for op in traced.program.ops if op.path in visit.not_entered()))


class _Visit:
    """A walk through a step in the order of evaluation.

    Attributes:
      operations: the equations that were visited.
    """

    def __init__(self, constraints: ShardingConstraints) -> None:
        self.operations: list[_Operation] = []
        self._constraints = constraints
        self._visited: set[Path] = set()

    def not_entered(self) -> set[Path]:
        """Return the paths of the equations with layouts that were not visited."""
        chains = {**self._constraints.operands, **self._constraints.results}
        return {path for path, each in chains.items() if any(each)} - self._visited

    def follow(self, jaxpr: Any, merged: Any, path: Path, around: tuple[Any, ...]) -> None:
        """Visit the equations of a jaxpr, and those that are nested in them.

        Args:
          merged: the same jaxpr with consecutive sums merged. Its equations are a subsequence of the equations of `jaxpr`, with
            the same variables for results.
          path: where the merged jaxpr is nested in the step.
          around: the sources of the equations around it.
        """
        left = list(enumerate(merged.eqns))[::-1]
        dropped: dict[Any, _Operation] = {}
        for equation in jaxpr.eqns:
            operation = _Operation(equation, (equation.source_info, *around))
            self.operations.append(operation)
            if not left or not _same_results(equation, left[-1][1]):
                dropped[equation.outvars[0]] = operation
                continue
            number, kept = left.pop()
            here = (*path, number)
            self._visited.add(here)
            operation.results = _layouts(self._constraints.results.get(here, ()))
            first = operation
            while kept.invars and first.equation.invars[0] is not kept.invars[0]:  # a sum that stands for several
                first = dropped[first.equation.invars[0]]
            first.operands = _layouts(self._constraints.operands.get(here, ()))
            for inner, other, part in _nested(equation, kept):
                self.follow(inner, other, (*here, *part), operation.sources)


def _same_results(equation: Any, other: Any) -> bool:
    """Return whether two equations have the same variables for results."""
    same = len(equation.outvars) == len(other.outvars) and equation.primitive is other.primitive
    return same and all(one is two for one, two in zip(equation.outvars, other.outvars, strict=True))


def _nested(equation: Any, merged: Any) -> Iterator[tuple[Any, Any, Path]]:
    """Yield the jaxprs that the printed code enters: each as it is and with sums merged, and its part of a path."""
    name = equation.primitive.name
    if name not in (*INLINED, *NESTED):
        return
    for key, others in held_jaxprs(merged).items():
        for number, (inner, other) in enumerate(zip(held_jaxprs(equation)[key], others, strict=True)):
            part: Path = (f"branch{number}",) if name == "cond" else (LOOP_BODIES[name][key],) if name in LOOP_BODIES else ()
            yield open_jaxpr(inner), open_jaxpr(other), part


def _layouts(chains: Sequence[tuple[Spec, ...] | None]) -> Layouts:
    return tuple((number, chain) for number, chain in enumerate(chains) if chain)


def _lines(operations: Iterable[tuple[Any, ...]]) -> tuple[str, ...]:
    """Return the lines of operations, each of them once, given what JAX recorded as their sources."""
    described = {describe_source(sources): source_text(sources) for sources in operations}
    short = ((re.sub(r"[\w.<>]+<locals>\.", "", line), text) for line, text in described.items() if line)
    return tuple(f"{line}: {text}" if text else line for line, text in short)


# Rows as code.


def quoted(value: Any) -> str:
    """Return the `repr` of a text, a tuple of texts or None, in double quotes where that changes nothing else."""
    text = repr(value)
    return text if '"' in text or "\\" in text else text.replace("'", '"')


def write_layout(spec: Spec) -> str:
    """Return a layout as it is written in code.

    >>> write_layout((("data", "model"), (), ("x",)))
    'P(("data", "model"), None, "x")'
    """
    return f"P({', '.join(quoted(entry[0] if len(entry) == 1 else entry or None) for entry in spec)})"


def write_row(row: CodeRow) -> str:
    """Return a row as it is written in code: on one line, or on several if it is too long for one."""
    chains = {f"{name}=": each for name, each in (("operands", row.operands), ("results", row.results)) if each}
    numbers = [f"numbers={_numbers(row.numbers)}", f"of={row.of}"] if row.numbers else []
    line = f"    Row({', '.join([quoted(row.operation), *(name + _chains(each) for name, each in chains.items()), *numbers])}),"
    if len(line) <= COLUMNS:
        return line
    parts = [quoted(row.operation), *(name + _chains(each, COLUMNS - 9 - len(name)) for name, each in chains.items())]
    parts += [textwrap.fill(each, COLUMNS - 9, subsequent_indent="    ") for each in numbers]
    return "\n".join(["    Row(", *(textwrap.indent(f"{part},", " " * 8) for part in parts), "    ),"])


def _chains(layouts: Layouts, columns: float = math.inf) -> str:
    """Return the layouts of operands or results, one on each line if they are longer than so many columns."""
    entries = [f"{number}: [{', '.join(map(write_layout, chain))}]" for number, chain in layouts]
    line = f"{{{', '.join(entries)}}}"
    return line if len(line) <= columns else "".join(["{\n", *(f"    {each},\n" for each in entries), "}"])


def _numbers(numbers: tuple[int, ...]) -> str:
    """Return numbers as they are written in code: as a range if they have one step.

    >>> _numbers((0, 4, 8, 12)), _numbers((0, 1))
    ('range(0, 13, 4)', '(0, 1)')
    """
    steps = {after - before for before, after in itertools.pairwise(numbers)}
    return f"range({numbers[0]}, {numbers[-1] + 1}, {steps.pop()})" if len(numbers) > 3 and len(steps) == 1 else repr(numbers)
