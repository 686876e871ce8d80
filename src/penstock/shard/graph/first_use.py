"""What is first computed with an input: a product of matrices, a convolution, a lookup."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.shard.graph.axis_groups import AxisGroups
from penstock.shard.trace.flat_program import FlatProgram, Op


@dataclass(frozen=True)
class FirstUse:
    """The first operation that computes with an input.

    Attributes:
      op: the operation.
      anchor: its number in `Groups.anchors`.
      factors: of the dimensions of the input that it has, the factors of its rule.
      lacks: leading dimensions that it has not, as a loop takes slices along them.
    """

    op: Op
    number: int
    factors: tuple[int | None, ...]
    scan_dims: int

    def sums_over(self, dim: int) -> bool:
        """Whether a dimension of the input is contracted, or looked up in: its results do not have it."""
        factor = self.factors[dim - self.scan_dims] if dim >= self.scan_dims else None
        return dim >= self.scan_dims and all(factor is None or factor not in result for result in self.op.rule.results)


def find_first_uses(program: FlatProgram, groups: AxisGroups) -> dict[int, FirstUse]:
    """Of inputs, by the number of their value, their first use.

    It is looked through what only copies an input: elementwise operations on nothing else, and the slices that a loop takes.
    """
    aliases = {value: (value, 0) for value in program.inputs}  # copy → input, and how many dimensions it lacks
    _follow_same_sharding(program, aliases, program.inputs)
    single = {op.path for group in groups.groups if group is not None for op in group.elementwise}
    non_elementwise = {op.path: number for number, op in enumerate(groups.non_elementwise)}
    found: dict[int, FirstUse] = {}
    for op in program.ops:
        read = [each for each in op.operands if each is not None]
        if op.path in single and len(read) == 1 and read[0] in aliases:
            if program.values[read[0]].shape == program.values[op.results[0]].shape:
                aliases.setdefault(op.results[0], aliases[read[0]])
                _follow_same_sharding(program, aliases, op.results)
        elif op.path in non_elementwise and (op.flops or op.primitive == "gather"):
            for operand, factors in zip(op.operands, op.rule.operands, strict=True):
                if operand in aliases and factors and aliases[operand][0] not in found:
                    value, scan_dims = aliases[operand]
                    found[value] = FirstUse(op, non_elementwise[op.path], factors, scan_dims)
    return found


def _follow_same_sharding(program: FlatProgram, aliases: dict[int, tuple[int, int]], values: Iterable[int]) -> None:
    wanted = set(values)
    for pair in program.same_sharding:
        if pair.outer in wanted:
            aliases.setdefault(pair.inner, (aliases[pair.outer][0], aliases[pair.outer][1] + pair.skip))
