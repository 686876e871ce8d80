"""The decisions of a plan, and what they cost each other: a graph.

A *node* is a decision. Its *slots* are what mesh axes may be given to: the dimensions of a stored input (a leaf), those of a
group of values, the factors of an operation. Each mesh axis is given to one slot of a node or to none.

An *edge* is an array that goes from one decision to the next, and has to change its layout on the way if they do not agree:
from how it is stored to how it is used, from a group to an operation's operand, from an operation's result (which may be
partial) to its group, and from a group back to where the state is stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.shard.graph.axis_groups import AxisGroups
from penstock.shard.graph.fusion import CONTRACTIONS, hbm_traffic
from penstock.shard.trace.flat_program import FlatProgram, Op

Dims = tuple[int | None, ...]
Work = tuple[str, float, tuple[tuple[float, Dims | None], ...]]


@dataclass(frozen=True)
class Node:
    """A decision.

    Attributes:
      kind: "leaf", "group", "copy" (of a group's value, for those that read it) or "op".
      sizes: of each slot, what a number of shards has to divide; 1 for a slot that has to stay whole.
      work: of each operation in it, in a step where nothing is sharded: dtype, FLOPs, and the memory traffic: bytes,
        and the slots that divide them, None where all do.
      fixed: of each slot the mesh axes it has to have, None where it is open; None if all are.
      label: the number of the input's value, of the operation, or of the group.
    """

    kind: str
    sizes: tuple[int, ...]
    work: tuple[Work, ...]
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
      kind: "use" (leaf to group), "copy" (group to copy), "spread" (leaf or group to the group of an elementwise
        operation that reads it), "operand", "result", "store" (group to leaf).
      position: of the operand or result.
    """

    a: int
    b: int
    source: Dims
    target: Dims
    partial: tuple[int, ...]
    bytes: int
    count: float
    value: int
    kind: str
    position: int = 0


@dataclass(frozen=True)
class Graph:
    """All decisions.

    `leaf` and `group` give the node of an input and of a value, `copy` that of a value for the operations that run a number
    of times, if there are several; `op` that of each anchor, in order.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    leaf: Mapping[int, int]
    group: Mapping[int, int]
    shared_reshard: Mapping[tuple[int, float], int]
    op: tuple[int, ...]


def build_graph(program: FlatProgram, groups: AxisGroups, state: Mapping[int, int], fixed_layouts: Mapping[int, tuple]) -> Graph:
    """The decisions of a program.

    Args:
      program: the step.
      groups: its axis groups.
      state: of each output (its place among the outputs) that is state, the place of its input.
      pinned: inputs, by place, whose layout is given: mesh axes of each dimension.
    """
    return _Builder(program, groups).build(state, fixed_layouts)


class _Builder:
    """Collects nodes and edges."""

    def __init__(self, program: FlatProgram, groups: AxisGroups):
        self.program, self.groups = program, groups
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.leaf: dict[int, int] = {}
        self.shared_reshard: dict[tuple[int, float], int] = {}
        self.hbm_traffic = hbm_traffic(program)
        self.time = {id(op): at for at, op in enumerate(program.ops)}
        self.group_of: dict[int, int] = {}

    def build(self, state: Mapping[int, int], fixed_layouts: Mapping[int, tuple]) -> Graph:
        self._add_groups()
        self._add_inputs(fixed_layouts)
        self._shared_reshards()
        ops = tuple(self._add_operation(op) for op in self.groups.non_elementwise)
        self._add_stores(state)
        return Graph(tuple(self.nodes), tuple(self.edges), self.leaf, self.group_of, self.shared_reshard, ops)

    def _add_groups(self) -> None:
        node_of: dict[int, int] = {}
        for number, group in enumerate(self.groups.groups):
            if group is not None:
                node_of[number] = len(self.nodes)
                sizes = tuple(1 if dim in group.replicated else size for dim, size in enumerate(group.sizes))
                self.nodes.append(Node("group", sizes, tuple(self._work_of(op) for op in group.elementwise), None, number))
        self.group_of = {value: node_of[number] for value, number in enumerate(self.groups.group)}

    def _add_inputs(self, fixed_layouts: Mapping[int, tuple]) -> None:
        program, groups = self.program, self.groups
        used = _read_inputs(program, groups)
        count_of = {result: op.count for op in program.ops for result in op.results}
        for index, value in enumerate((*program.inputs, *program.constants)):
            self.leaf[value] = len(self.nodes)
            shape = program.values[value].shape
            fixed = fixed_layouts.get(index) if index < len(program.inputs) else ((),) * len(shape)
            self.nodes.append(Node("leaf", shape, (), fixed, value))
            if value in used:
                self._add_edge(self.leaf[value], self.group_of[value], value, range(len(shape)), groups.dims[value], "use")
        for value, result, dims in groups.broadcast_uses:
            target = tuple(None if dim is None else groups.dims[result][dim] for dim in dims)
            of = self.leaf[value] if value in self.leaf else self.group_of[value]
            self._add_edge(
                of, self.group_of[result], value, self._layout_dims(value), target, "broadcast", count=count_of[result]
            )

    def _shared_reshards(self) -> None:
        """A value that several operations read can be brought into another layout for all of them, once."""
        readers = Counter(
            (operand, op.count)
            for op in self.groups.non_elementwise
            for operand in {each for each in op.operands if each is not None}
        )
        for (value, count), number in readers.items():
            dims = self.groups.dims[value]
            if number > 1 and any(dim is not None for dim in dims):
                group = self.group_of[value]
                self.shared_reshard[value, count] = len(self.nodes)
                self.nodes.append(Node("shared_reshard", self.nodes[group].sizes, (), None, value))
                self._add_edge(group, self.shared_reshard[value, count], value, dims, dims, "shared_reshard", count=count)

    def _add_operation(self, op: Op) -> int:
        node = len(self.nodes)
        self.nodes.append(Node("op", op.rule.sizes, (self._work_of(op),), _fixed_factors(op), self.time[id(op)]))
        for position, (operand, factors) in enumerate(zip(op.operands, op.rule.operands, strict=True)):
            if operand is not None and factors:
                of = self.shared_reshard.get((operand, op.count), self.group_of[operand])
                self._add_edge(
                    of, node, operand, self.groups.dims[operand], factors, "operand", count=op.count, position=position
                )
        for position, (result, factors) in enumerate(zip(op.results, op.rule.results, strict=True)):
            partial = tuple(factor for factor in range(len(op.rule.sizes)) if factor not in factors) if op.fixed is None else ()
            target, into = self.groups.dims[result], self.group_of[result]
            self._add_edge(node, into, result, factors, target, "result", partial=partial, count=op.count, position=position)
        return node

    def _add_stores(self, state: Mapping[int, int]) -> None:
        for index, replaced in state.items():
            value, stored = self.program.outputs[index], self.program.inputs[replaced]
            if value is not None and value != stored:
                of = self.leaf[value] if value in self.leaf else self.group_of[value]  # an input may come back in another's place
                dims = self._layout_dims(value)
                self._add_edge(of, self.leaf[stored], value, dims, range(len(dims)), "store")

    def _layout_dims(self, value: int) -> Dims:
        """The slots that lay a value out: those of its leaf, if it is stored, or of its group."""
        return tuple(range(len(self.program.values[value].shape))) if value in self.leaf else self.groups.dims[value]

    def _work_of(self, op: Op) -> Work:
        """Operations that want their operands in memory read, on each device, what they have of each of them."""
        flops, count = op.flops * op.count, op.count
        if op.primitive not in CONTRACTIONS:
            return _dtype(self.program, op), flops, ((self.hbm_traffic[self.time[id(op)]] * count, None),)
        read = [(each, dims) for each, dims in zip(op.operands, op.rule.operands, strict=True) if each is not None]
        moved = (*read, *zip(op.results, op.rule.results, strict=True))
        return _dtype(self.program, op), flops, tuple((self.program.values[each].bytes * count, dims) for each, dims in moved)

    def _add_edge(
        self,
        a: int,
        b: int,
        value: int,
        source: Sequence[int | None],
        target: Sequence[int | None],
        kind: str,
        *,
        partial: tuple[int, ...] = (),
        count: float = 1.0,
        position: int = 0,
    ) -> None:
        large = [dim for dim, size in enumerate(self.program.values[value].shape) if size > 1]
        dims = tuple(source[dim] for dim in large), tuple(target[dim] for dim in large)
        self.edges.append(Edge(a, b, *dims, partial, self.program.values[value].bytes, count, value, kind, position))


def _read_inputs(program: FlatProgram, groups: AxisGroups) -> set[int]:
    """Inputs that something other than an elementwise operation reads: all that have to have a layout to be used in."""
    read = {operand for op in groups.non_elementwise for operand in op.operands}
    tied = {tie.outer for tie in program.same_sharding}
    return {value for value in (*program.inputs, *program.constants) if value in read or value in tied}


def _fixed_factors(op: Op) -> tuple[tuple[str, ...] | None, ...] | None:
    """What the program prescribes for the factors of an operation."""
    if op.fixed is None:
        return None
    fixed: dict[int, tuple[str, ...] | None] = {}
    for factors, entries in zip((*op.rule.operands, *op.rule.results), op.fixed, strict=True):
        for factor, entry in zip(factors, entries, strict=True):
            if factor is not None:
                fixed[factor] = entry
    return tuple(fixed.get(factor) for factor in range(len(op.rule.sizes)))


def _dtype(program: FlatProgram, op: Op) -> str:
    """The type in which an operation computes: that of its largest operand."""
    values = [program.values[each] for each in op.operands if each is not None] or [program.values[op.results[0]]]
    dtype = max(values, key=lambda value: value.bytes).dtype
    try:
        return np.dtype(dtype).name
    except TypeError:  # keys of random numbers, which are made of it
        return "uint32"


def connect_dims(graph: Graph) -> dict[tuple[int, int], int]:
    """Of each node and slot a number that is the same for all slots that edges lead to from it, and back."""
    above = {(number, dim): (number, dim) for number, node in enumerate(graph.nodes) for dim in range(len(node.sizes))}

    def top(each: tuple[int, int]) -> tuple[int, int]:
        while above[each] != each:
            above[each] = above[above[each]]
            each = above[each]
        return each

    for edge in graph.edges:
        for a, b in zip(edge.source, edge.target, strict=True):
            if a is not None and b is not None:
                above[top((edge.a, a))] = top((edge.b, b))
    numbers: dict[tuple[int, int], int] = {}
    return {each: numbers.setdefault(top(each), len(numbers)) for each in above}
