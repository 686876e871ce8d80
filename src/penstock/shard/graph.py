"""The decisions of a plan, and what they cost each other: a graph.

A *node* is a decision. Its *slots* are what mesh axes may be given to: the dimensions of a stored input (a leaf), those of a
group of values, the factors of an operation. Each mesh axis is given to one slot of a node or to none.

An *edge* is an array that goes from one decision to the next, and has to change its layout on the way if they do not agree:
from how it is stored to how it is used, from a group to an operation's operand, from an operation's result (which may be
partial) to its group, and from a group back to where the state is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.shard.axes import Groups
from penstock.shard.program import Op, Program
from penstock.shard.traffic import traffic

Slots = tuple[int | None, ...]


@dataclass(frozen=True)
class Node:
    """A decision.

    Attributes:
      kind: "leaf", "group" or "op".
      sizes: of each slot, what a number of shards has to divide; 1 for a slot that has to stay whole.
      work: of each operation in it: (dtype, FLOPs, bytes of memory traffic) in a step where nothing is sharded.
      fixed: of each slot the mesh axes it has to have, None where it is open; None if all are.
      label: the number of the input's value, of the operation, or of the group.
    """

    kind: str
    sizes: tuple[int, ...]
    work: tuple[tuple[str, float, float], ...]
    fixed: tuple[tuple[str, ...] | None, ...] | None
    label: int


@dataclass(frozen=True)
class Edge:
    """An array on its way from one decision to another.

    Attributes:
      a, b: nodes.
      source: of each dimension (those larger than one) the slot of `a` that lays it out.
      target: the same of `b`.
      partial: slots of `a` over which the array is still to be summed.
      bytes: of the whole array.
      count: how often it goes this way in a step.
      value: its number in the program.
      kind: "use" (leaf to group), "spread" (leaf or group to the group of an elementwise operation that reads it),
        "operand", "result", "store" (group to leaf).
      position: of the operand or result.
    """

    a: int
    b: int
    source: Slots
    target: Slots
    partial: tuple[int, ...]
    bytes: int
    count: float
    value: int
    kind: str
    position: int = 0


@dataclass(frozen=True)
class Graph:
    """All decisions. `leaf` and `group` give the node of an input and of a value; `op` that of each anchor, in order."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    leaf: Mapping[int, int]
    group: Mapping[int, int]
    op: tuple[int, ...]


def graph_of(program: Program, groups: Groups, state: Mapping[int, int], pinned: Mapping[int, tuple]) -> Graph:
    """The decisions of a program.

    Args:
      program: the step.
      groups: its axis groups.
      state: of each output (its place among the outputs) that is state, the place of its input.
      pinned: inputs, by place, whose layout is given: mesh axes of each dimension.
    """
    moved = traffic(program)
    time = {id(op): at for at, op in enumerate(program.ops)}

    def work(op: Op) -> tuple[str, float, float]:
        return _dtype(program, op), op.flops * op.count, moved[time[id(op)]] * op.count

    nodes: list[Node] = []
    edges: list[Edge] = []
    node_of_group: dict[int, int] = {}
    for number, group in enumerate(groups.groups):
        if group is None:
            continue
        node_of_group[number] = len(nodes)
        sizes = tuple(1 if dim in group.whole else size for dim, size in enumerate(group.sizes))
        nodes.append(Node("group", sizes, tuple(work(op) for op in group.elementwise), None, number))
    group_of = {value: node_of_group[number] for value, number in enumerate(groups.group)}

    leaf: dict[int, int] = {}
    used = _used(program, groups)
    count_of = {result: op.count for op in program.ops for result in op.results}
    for place, value in enumerate((*program.inputs, *program.constants)):
        leaf[value] = len(nodes)
        shape = program.values[value].shape
        fixed = pinned.get(place) if place < len(program.inputs) else ((),) * len(shape)
        nodes.append(Node("leaf", shape, (), fixed, value))
        if value in used:
            edges.append(_between(program, groups, leaf[value], group_of[value], value, "use"))
    for value, result, dims in groups.spread:
        target = tuple(None if dim is None else groups.dims[result][dim] for dim in dims)
        of = leaf[value] if value in leaf else group_of[value]
        slots = _slots(program, groups, value, value in leaf)
        edges.append(_edge(program, of, group_of[result], value, slots, target, "spread", (), count_of[result]))

    op_nodes = []
    for op in groups.anchors:
        node = len(nodes)
        op_nodes.append(node)
        nodes.append(Node("op", op.rule.sizes, (work(op),), _fixed(op), time[id(op)]))
        for position, (operand, factors) in enumerate(zip(op.operands, op.rule.operands, strict=True)):
            if operand is not None and factors:
                edges.append(
                    _edge(
                        program,
                        group_of[operand],
                        node,
                        operand,
                        groups.dims[operand],
                        factors,
                        "operand",
                        (),
                        op.count,
                        position,
                    )
                )
        for position, (result, factors) in enumerate(zip(op.results, op.rule.results, strict=True)):
            partial = tuple(factor for factor in range(len(op.rule.sizes)) if factor not in factors) if op.fixed is None else ()
            edges.append(
                _edge(
                    program, node, group_of[result], result, factors, groups.dims[result], "result", partial, op.count, position
                )
            )
    for place, replaced in state.items():
        returned, stored = program.outputs[place], program.inputs[replaced]
        if returned is None or returned == stored:
            continue
        value = returned
        slots = _slots(program, groups, value, value in leaf)  # an input may come back in another's place
        of = leaf[value] if value in leaf else group_of[value]
        edges.append(_edge(program, of, leaf[stored], value, slots, range(len(slots)), "store", (), 1.0))
    return Graph(tuple(nodes), tuple(edges), leaf, group_of, tuple(op_nodes))


def _slots(program: Program, groups: Groups, value: int, stored: bool) -> Slots:
    """The slots that lay a value out: those of its leaf, if it is stored, or of its group."""
    return tuple(range(len(program.values[value].shape))) if stored else groups.dims[value]


def _used(program: Program, groups: Groups) -> set[int]:
    """Inputs that something other than an elementwise operation reads: all that have to have a layout to be used in."""
    read = {operand for op in groups.anchors for operand in op.operands}
    tied = {tie.outer for tie in program.ties}
    return {value for value in (*program.inputs, *program.constants) if value in read or value in tied}


def _between(program: Program, groups: Groups, leaf: int, group: int, value: int, kind: str) -> Edge:
    dims = groups.dims[value]
    return _edge(program, leaf, group, value, range(len(dims)), dims, kind, (), 1.0)


def _edge(
    program: Program,
    a: int,
    b: int,
    value: int,
    source: Sequence[int | None],
    target: Sequence[int | None],
    kind: str,
    partial: tuple[int, ...],
    count: float,
    position: int = 0,
) -> Edge:
    shape = program.values[value].shape
    large = [dim for dim, size in enumerate(shape) if size > 1]
    return Edge(
        a,
        b,
        tuple(source[dim] for dim in large),
        tuple(target[dim] for dim in large),
        partial,
        program.values[value].bytes,
        count,
        value,
        kind,
        position,
    )


def _fixed(op: Op) -> tuple[tuple[str, ...] | None, ...] | None:
    """What the program prescribes for the factors of an operation."""
    if op.fixed is None:
        return None
    fixed: dict[int, tuple[str, ...] | None] = {}
    for factors, entries in zip((*op.rule.operands, *op.rule.results), op.fixed, strict=True):
        for factor, entry in zip(factors, entries, strict=True):
            if factor is not None:
                fixed[factor] = entry
    return tuple(fixed.get(factor) for factor in range(len(op.rule.sizes)))


def _dtype(program: Program, op: Op) -> str:
    """The type in which an operation computes: that of its largest operand."""
    values = [program.values[each] for each in op.operands if each is not None] or [program.values[op.results[0]]]
    dtype = max(values, key=lambda value: value.bytes).dtype
    try:
        return np.dtype(dtype).name
    except TypeError:
        return "uint32"
