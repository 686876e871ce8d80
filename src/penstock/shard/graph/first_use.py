"""Find the first non-elementwise use of each input: a matrix product, a convolution or a lookup.

Roles, and the layout "in use" that a plan reports, are read from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.shard.graph.axis_groups import AxisGroups
from penstock.shard.trace.flat_program import FlatProgram, Op


@dataclass(frozen=True)
class FirstUse:
    """The first non-elementwise operation that reads an input.

    Attributes:
      op: the operation.
      index: its index in `AxisGroups.non_elementwise`.
      factors: the factors of its rule for the dimensions of the input, without the first `scan_dims`.
      scan_dims: the number of leading dimensions of the input along which loops take slices.
    """

    op: Op
    index: int
    factors: tuple[int | None, ...]
    scan_dims: int

    def sums_over(self, dim: int) -> bool:
        """Return whether a dimension of the input is contracted or looked up, so that the results do not have it.

        Args:
          dim: a dimension of the input.
        """
        factor = self.factors[dim - self.scan_dims] if dim >= self.scan_dims else None
        return dim >= self.scan_dims and all(factor is None or factor not in result for result in self.op.rule.results)


def find_first_uses(program: FlatProgram, groups: AxisGroups) -> dict[int, FirstUse]:
    """Return the first non-elementwise use of each input that has one, by the index of the input's value.

    Elementwise operations with a single operand, such as a cast, and slices that a loop takes count as the input itself.

    Args:
      program: the step.
      groups: its axis groups.
    """
    aliases = {value: (value, 0) for value in program.inputs}  # Value → the input that it stands for, and sliced dimensions.
    _follow_same_sharding(program, aliases, program.inputs)
    elementwise = {op.path for group in groups.groups if group is not None for op in group.elementwise}
    non_elementwise = {op.path: index for index, op in enumerate(groups.non_elementwise)}
    uses: dict[int, FirstUse] = {}
    for op in program.ops:
        operands = [value for value in op.operands if value is not None]
        if op.path in elementwise and len(operands) == 1 and operands[0] in aliases:
            if program.values[operands[0]].shape == program.values[op.results[0]].shape:
                aliases.setdefault(op.results[0], aliases[operands[0]])
                _follow_same_sharding(program, aliases, op.results)
        elif op.path in non_elementwise and (op.flops or op.primitive == "gather"):
            for operand, factors in zip(op.operands, op.rule.operands, strict=True):
                if operand in aliases and factors and aliases[operand][0] not in uses:
                    value, scan_dims = aliases[operand]
                    uses[value] = FirstUse(op, non_elementwise[op.path], factors, scan_dims)
    return uses


def _follow_same_sharding(program: FlatProgram, aliases: dict[int, tuple[int, int]], values: Iterable[int]) -> None:
    """Add the values inside of loops that stand for the same inputs as some values outside."""
    outside = set(values)
    for pair in program.same_sharding:
        if pair.outer in outside:
            aliases.setdefault(pair.inner, (aliases[pair.outer][0], aliases[pair.outer][1] + pair.skip))
