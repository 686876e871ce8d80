"""Axis groups: which dimensions of which values are sharded together.

Values that elementwise operations connect form a *group*: one decision lays them all out. (The dimensions of a group are what
TOAST, arXiv 2508.15010, calls named dimensions, kept apart wherever an operation other than an elementwise one stands between
them: there, a change of layout may pay.) Two kinds of values are kept out of groups they would fall into:

- what the step is given is stored as one thing and used as another, as storing costs memory and using does not, so that an input
  has its own decision beside that of the group in which it is used;
- an operation whose dimensions contradict each other (x + x.T) keeps its operands and results apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.shard.trace.flat_program import FlatProgram, Op

Dims = tuple[int | None, ...]


@dataclass
class AxisGroup:
    """Values of one layout.

    Attributes:
      sizes: of its dimensions, without those of size one.
      whole: dimensions that may not be sharded.
      values: that belong to it.
      elementwise: the operations inside of it.
    """

    sizes: tuple[int, ...]
    replicated: set[int] = field(default_factory=set)
    values: list[int] = field(default_factory=list)
    elementwise: list[Op] = field(default_factory=list)


@dataclass
class AxisGroups:
    """All groups of a program.

    Attributes:
      groups: numbered; those that were merged into another are None.
      dims: of each value, of each of its dimensions, that of its group; None is a dimension of size one, or one that stays whole.
      group: of each value.
      anchors: the operations that are no part of a group, in order.
      spread: (operand, result, dims): an operand of an elementwise operation that is an input, or that has one
        element for many of the result's; of each of its dimensions, the one of the result.
    """

    groups: list[AxisGroup | None]
    dims: list[Dims]
    group: list[int]
    non_elementwise: list[Op]
    broadcast_uses: list[tuple[int, int, Dims]]


def find_axis_groups(program: FlatProgram) -> AxisGroups:
    """Find the groups of a program."""
    groups = AxisGroups([], [], [], [], [])
    for number, value in enumerate(program.values):
        large = [dim for dim, size in enumerate(value.shape) if size > 1]
        position = {dim: at for at, dim in enumerate(large)}
        groups.groups.append(AxisGroup(tuple(value.shape[dim] for dim in large), values=[number]))
        groups.dims.append(tuple(position.get(dim) for dim in range(len(value.shape))))
        groups.group.append(number)
    # Loops first: a carry has the layout of what it starts from, whatever else stands in the way.
    for pair in program.same_sharding:
        _merge_same_sharding(groups, pair.outer, pair.inner, pair.skip)
    inputs = {*program.inputs, *program.constants}
    for op in program.ops:
        if not op.rule.identity or op.fixed is not None or not _merge_operation(groups, op, inputs):
            groups.non_elementwise.append(op)
    return groups


def _merge_same_sharding(groups: AxisGroups, outer: int, inner: int, skip: int) -> None:
    into = groups.groups[groups.group[outer]]
    assert into is not None
    for dim in groups.dims[outer][:skip]:
        if dim is not None:
            into.replicated.add(dim)
    _merge(groups, outer, inner, list(zip(groups.dims[outer][skip:], groups.dims[inner], strict=True)))


def _merge_operation(groups: AxisGroups, op: Op, inputs: set[int]) -> bool:
    """Put the operands and results of an elementwise operation into one group, if that can be."""
    result = op.results[0]
    result_dims = dict(zip(op.rule.results[0], groups.dims[result], strict=True))

    def pairs(value: int, dims: Dims) -> list[tuple[int | None, int | None]]:
        return [(result_dims.get(factor), dim) for factor, dim in zip(dims, groups.dims[value], strict=True)]

    read = [(each, dims) for each, dims in zip(op.operands, op.rule.operands, strict=True) if each is not None and dims]
    full = len([size for size in op.rule.sizes if size > 1])
    shares = [
        (each, dims) for each, dims in read if each not in inputs and sum(dim is not None for dim in groups.dims[each]) == full
    ]
    for value, dims in (*zip(op.results[1:], op.rule.results[1:], strict=True), *shares):
        if not _merge(groups, result, value, pairs(value, dims)):
            return False
        result_dims = dict(zip(op.rule.results[0], groups.dims[result], strict=True))
    at = {factor: dim for dim, factor in enumerate(op.rule.results[0]) if factor is not None}
    for value, dims in read:
        if (value, dims) not in shares:
            groups.broadcast_uses.append((value, result, tuple(None if factor is None else at.get(factor) for factor in dims)))
    into = groups.groups[groups.group[result]]
    assert into is not None
    into.elementwise.append(op)
    return True


def _merge(groups: AxisGroups, first: int, second: int, pairs: list[tuple[int | None, int | None]]) -> bool:
    """Merge the group of one value with another's, given which dimensions are the same; False if they contradict each other."""
    one, other = groups.group[first], groups.group[second]
    same = [(a, b) for a, b in pairs if a is not None and b is not None]
    if one == other:
        return all(a == b for a, b in same)
    into, gone = groups.groups[one], groups.groups[other]
    assert into is not None
    assert gone is not None
    if len(gone.sizes) > len(into.sizes):
        return _merge(groups, second, first, [(b, a) for a, b in pairs])
    renamed = {b: a for a, b in same}
    if len(renamed) != len(gone.sizes) or len(set(renamed.values())) != len(renamed):
        return False
    if any(gone.sizes[b] != into.sizes[a] for b, a in renamed.items()):
        return False
    if len(gone.values) > len(into.values) and len(gone.sizes) == len(into.sizes):
        return _merge(groups, second, first, [(b, a) for a, b in pairs])
    into.replicated |= {renamed[dim] for dim in gone.replicated}
    into.replicated |= set(range(len(into.sizes))) - set(renamed.values())
    for value in gone.values:
        groups.group[value] = one
        groups.dims[value] = tuple(None if dim is None else renamed[dim] for dim in groups.dims[value])
    into.values += gone.values
    into.elementwise += gone.elementwise
    groups.groups[other] = None
    return True
