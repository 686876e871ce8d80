"""Find the first non-elementwise use of each input, a matrix product, a convolution or a lookup, and the slices that loops take.

Roles, and the layout "in use" that a plan reports, are read from the first, and the number of layers from the second.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.shard.graph.axis_groups import AxisGroups
from penstock.shard.trace.flat_program import FlatProgram, Op, SameSharding

Dims = tuple[int | None, ...]

SELECT_ELEMENTS = {
    **dict.fromkeys(("reshape", "slice", "dynamic_slice", "split", "unstack", "rev", "copy", "sharding_constraint"), 1),
    "optimization_barrier": None,
}
"""Primitives that move or select elements, and whose results keep dimensions of their operands → how many of their first operands
hold these elements; None for all. Elementwise operations, such as casts and transposes, are known by their rules."""


@dataclass(frozen=True)
class FirstUse:
    """The first non-elementwise operation that reads an input, perhaps after casts, transposes, reshapes and slices.

    Attributes:
      op: the operation.
      index: its index in `AxisGroups.non_elementwise`.
      factors: the factors of its rule for the dimensions of the operand that it reads.
      dims: for each dimension of the input, the dimension of that operand; None for a dimension that the operand does not have,
        such as one along which loops take slices, or the minor one of two that are merged.
    """

    op: Op
    index: int
    factors: Dims
    dims: Dims

    def factor(self, dim: int) -> int | None:
        """Return the factor of the operation for a dimension of the input; None if there is none."""
        at = self.dims[dim]
        return None if at is None else self.factors[at]

    def sums_over(self, dim: int) -> bool:
        """Return whether a dimension of the input is contracted or looked up, so that the results do not have it.

        Args:
          dim: a dimension of the input.
        """
        factor = self.factor(dim)
        return self.dims[dim] is not None and all(factor is None or factor not in result for result in self.op.rule.results)


@dataclass(frozen=True)
class InputUses:
    """How a step uses its inputs.

    Attributes:
      first: value of an input → its first non-elementwise use, if it has one.
      slices: value of an input → the number of slices that loops take of it, as of the stacked weights of all layers; 1 if they
        take none.
    """

    first: dict[int, FirstUse]
    slices: dict[int, int]


@dataclass(frozen=True)
class _Alias:
    """A value that has the elements of an input, or some of them.

    Attributes:
      input: the value of the input.
      dims: for each dimension of the input, the dimension of this value, or None.
      slices: the number of slices that loops take of the input, if this is one of them; else 1.
    """

    input: int
    dims: Dims
    slices: int = 1


def find_uses(program: FlatProgram, groups: AxisGroups) -> InputUses:
    """Return the first non-elementwise use of each input, and the number of slices that loops take of it.

    Operations that only cast, move or select the elements of one array count as no use, and slices that a loop takes count as
    the input itself.

    Args:
      program: the step.
      groups: its axis groups.
    """
    aliases = _Aliases(program)
    non_elementwise = {op.path: index for index, op in enumerate(groups.non_elementwise)}
    uses: dict[int, FirstUse] = {}
    for op in program.ops:
        followed = aliases.follow(op)
        if followed or op.path not in non_elementwise or not (op.flops or op.primitive == "gather"):
            continue
        for operand, factors in zip(op.operands, op.rule.operands, strict=True):
            alias = aliases.of.get(operand) if operand is not None else None
            if alias is not None and factors and alias.input not in uses:
                uses[alias.input] = FirstUse(op, non_elementwise[op.path], factors, alias.dims)
    slices: dict[int, int] = {}
    for alias in aliases.of.values():
        slices[alias.input] = max(alias.slices, slices.get(alias.input, 1))
    return InputUses(uses, slices)


class _Aliases:
    """The values that stand for inputs, found in program order.

    Attributes:
      of: value → the input that it stands for.
    """

    def __init__(self, program: FlatProgram) -> None:
        self.of = {value: _Alias(value, tuple(range(len(program.values[value].shape)))) for value in program.inputs}
        self._program = program
        self._inside: dict[int, list[SameSharding]] = defaultdict(list)
        for pair in program.same_sharding:
            self._inside[pair.outer].append(pair)
        self._enter_loops(program.inputs)

    def follow(self, op: Op) -> bool:
        """Let the results of an operation stand for the inputs whose elements they have.

        Args:
          op: the operation.

        Returns:
          Whether the operation only casts, moves or selects elements.
        """
        operands = self._moved_operands(op)
        for operand, factors in operands:
            if operand not in self.of:
                continue
            alias = self.of[operand]
            for result, kept in zip(op.results, op.rule.results, strict=True):
                if not factors or set(factors) & set(kept) - {None}:  # else it is the result of another operand
                    to = [kept.index(factor) if factor is not None and factor in kept else None for factor in factors]
                    dims = tuple(None if dim is None else to[dim] for dim in alias.dims)
                    self.of.setdefault(result, replace(alias, dims=dims))
        self._enter_loops(op.results)
        return bool(operands)

    def _moved_operands(self, op: Op) -> list[tuple[int, Dims]]:
        """Return the operands whose elements the results of an operation are, with their factors."""
        operands = [(value, dims) for value, dims in zip(op.operands, op.rule.operands, strict=True) if value is not None]
        if op.rule.identity:
            arrays = [each for each in operands if self._program.values[each[0]].shape]
            return arrays if len(arrays) == 1 else []
        return operands[: SELECT_ELEMENTS[op.primitive]] if op.primitive in SELECT_ELEMENTS else []

    def _enter_loops(self, values: Iterable[int]) -> None:
        """Let the values inside of loops stand for the same inputs as the values outside that they come from."""
        queue = [value for value in values if value in self.of and value in self._inside]
        while queue:
            outer = queue.pop()
            alias, shape = self.of[outer], self._program.values[outer].shape
            for pair in self._inside[outer]:
                if pair.inner not in self.of:
                    dims = tuple(None if dim is None or dim < pair.skip else dim - pair.skip for dim in alias.dims)
                    self.of[pair.inner] = _Alias(alias.input, dims, max(1, alias.slices * math.prod(shape[: pair.skip])))
                    queue.append(pair.inner)
