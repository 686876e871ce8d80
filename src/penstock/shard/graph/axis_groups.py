"""Find axis groups: values that elementwise operations connect, and that therefore share one layout. The method is union-find.

The dimensions of a group are the *named dimensions* of TOAST (arXiv 2508.15010), with one difference: a non-elementwise operation
separates groups, because resharding may pay there. Two kinds of values do not join a group, although elementwise operations
connect them with it:

- an input of the step has a decision of its own, because its layout in storage may differ from the layout in which it is used;
- operands and results of an operation whose dimensions contradict each other, such as x + x.T, stay in separate groups.

The *first use* of an input is the first matrix product, convolution or lookup that reads it. It decides the input's role, and the
layout "in use" that a plan reports. The slices that loops take of an input are the number of layers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from penstock.shard.trace.flat_program import FlatProgram, Op, SameSharding
from penstock.shard.trace.rules import Dims


@dataclass
class AxisGroup:
    """A set of values that share one layout.

    Attributes:
      sizes: sizes of its dimensions, without dimensions of size one.
      replicated: dimensions that may not be sharded.
      values: indices of its values in the program.
      elementwise: the elementwise operations between its values.
    """

    sizes: tuple[int, ...]
    replicated: set[int] = field(default_factory=set)
    values: list[int] = field(default_factory=list)
    elementwise: list[Op] = field(default_factory=list)


@dataclass
class AxisGroups:
    """All axis groups of a program.

    Attributes:
      groups: the groups; None instead of a group that was merged into another.
      dims: for each value and each of its dimensions, the dimension of its group; None for a dimension of size one, or one
        that is replicated.
      group: for each value, the index of its group.
      non_elementwise: the operations that belong to no group, in program order.
      broadcast_uses: triples (operand, result, dims) for operands of elementwise operations that keep a layout of their own:
        inputs of the step, and operands that are broadcast. `dims` has the dimension of the result for each dimension of the
        operand, or None.
    """

    groups: list[AxisGroup | None]
    dims: list[Dims]
    group: list[int]
    non_elementwise: list[Op]
    broadcast_uses: list[tuple[int, int, Dims]]


def find_axis_groups(program: FlatProgram) -> AxisGroups:
    """Return the axis groups of a program."""
    groups = AxisGroups([], [], [], [], [])
    for number, value in enumerate(program.values):
        large = [dim for dim, size in enumerate(value.shape) if size > 1]
        position = {dim: index for index, dim in enumerate(large)}
        groups.groups.append(AxisGroup(tuple(value.shape[dim] for dim in large), values=[number]))
        groups.dims.append(tuple(position.get(dim) for dim in range(len(value.shape))))
        groups.group.append(number)
    # Merge over loops first: a carry must have the layout of its initial value, even if other merges then fail.
    for pair in program.same_sharding:
        _merge_same_sharding(groups, pair.outer, pair.inner, pair.skip)
    inputs = {*program.inputs, *program.constants}
    for op in program.ops:
        if not op.rule.identity or op.fixed is not None or not _merge_operation(groups, op, inputs):
            groups.non_elementwise.append(op)
    return groups


def _merge_same_sharding(groups: AxisGroups, outer: int, inner: int, skip: int) -> None:
    """Merge the groups of two values of a same-sharding constraint, and replicate the first `skip` dimensions of `outer`."""
    into = groups.groups[groups.group[outer]]
    assert into is not None
    for dim in groups.dims[outer][:skip]:
        if dim is not None:
            into.replicated.add(dim)
    _merge(groups, outer, inner, list(zip(groups.dims[outer][skip:], groups.dims[inner], strict=True)))


def _merge_operation(groups: AxisGroups, op: Op, inputs: set[int]) -> bool:
    """Merge the operands and results of an elementwise operation into one group.

    Return False if their dimensions contradict each other. Merges before the contradiction remain.
    """
    result = op.results[0]
    result_dims = dict(zip(op.rule.results[0], groups.dims[result], strict=True))

    def pairs(value: int, dims: Dims) -> list[tuple[int | None, int | None]]:
        return [(result_dims.get(factor), dim) for factor, dim in zip(dims, groups.dims[value], strict=True)]

    operands = [(value, dims) for value, dims in zip(op.operands, op.rule.operands, strict=True) if value is not None and dims]
    full_rank = len([size for size in op.rule.sizes if size > 1])
    merged = [
        (value, dims)
        for value, dims in operands
        if value not in inputs and sum(dim is not None for dim in groups.dims[value]) == full_rank
    ]
    for value, dims in (*zip(op.results[1:], op.rule.results[1:], strict=True), *merged):
        if not _merge(groups, result, value, pairs(value, dims)):
            return False
        result_dims = dict(zip(op.rule.results[0], groups.dims[result], strict=True))
    dim_of = {factor: dim for dim, factor in enumerate(op.rule.results[0]) if factor is not None}
    for value, dims in operands:
        if (value, dims) not in merged:
            target = tuple(None if factor is None else dim_of.get(factor) for factor in dims)
            groups.broadcast_uses.append((value, result, target))
    into = groups.groups[groups.group[result]]
    assert into is not None
    into.elementwise.append(op)
    return True


def _merge(groups: AxisGroups, first: int, second: int, pairs: list[tuple[int | None, int | None]]) -> bool:
    """Merge the groups of two values, the smaller into the larger. Return False, without a merge, if they contradict each other.

    `pairs` are the dimensions of the group of `first` and of `second` that have to be sharded together. Dimensions of the larger
    group that the smaller group does not have become replicated.
    """
    one, other = groups.group[first], groups.group[second]
    same = [(a, b) for a, b in pairs if a is not None and b is not None]
    if one == other:
        return all(a == b for a, b in same)
    into, absorbed = groups.groups[one], groups.groups[other]
    assert into is not None
    assert absorbed is not None
    if len(absorbed.sizes) > len(into.sizes):
        return _merge(groups, second, first, [(b, a) for a, b in pairs])
    renamed = {b: a for a, b in same}
    bijective = len(absorbed.sizes) == len(renamed) == len(set(renamed.values()))
    if not bijective or any(absorbed.sizes[b] != into.sizes[a] for b, a in renamed.items()):
        return False
    if len(absorbed.values) > len(into.values) and len(absorbed.sizes) == len(into.sizes):
        return _merge(groups, second, first, [(b, a) for a, b in pairs])
    into.replicated |= {renamed[dim] for dim in absorbed.replicated}
    into.replicated |= set(range(len(into.sizes))) - set(renamed.values())
    for value in absorbed.values:
        groups.group[value] = one
        groups.dims[value] = tuple(None if dim is None else renamed[dim] for dim in groups.dims[value])
    into.values += absorbed.values
    into.elementwise += absorbed.elementwise
    groups.groups[other] = None
    return True


# First uses

SELECT_ELEMENTS = {
    **dict.fromkeys(("reshape", "slice", "dynamic_slice", "split", "unstack", "rev", "copy", "sharding_constraint"), 1),
    "optimization_barrier": None,
}
"""Primitives that move or select elements, and whose results keep dimensions of their operands → how many of their first operands
hold these elements; None for all. Rules tell elementwise operations, such as casts and transposes."""


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
        """Return whether a dimension of the input is contracted or looked up, so that the results do not have it."""
        factor = self.factor(dim)
        return self.dims[dim] is not None and (factor is None or self.op.rule.reduced(factor))


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
        """Add the results of an operation that only casts, moves or selects elements; return whether it is one."""
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
        """Add the values inside of loops that come from some values outside."""
        queue = [value for value in values if value in self.of and value in self._inside]
        while queue:
            outer = queue.pop()
            alias, shape = self.of[outer], self._program.values[outer].shape
            for pair in self._inside[outer]:
                if pair.inner not in self.of:
                    dims = tuple(None if dim is None or dim < pair.skip else dim - pair.skip for dim in alias.dims)
                    self.of[pair.inner] = _Alias(alias.input, dims, max(1, alias.slices * math.prod(shape[: pair.skip])))
                    queue.append(pair.inner)
