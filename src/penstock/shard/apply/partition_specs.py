"""Write an assignment as partition specs of the inputs and outputs, and of the operands and results inside of the step.

An operand or a result inside of the step has a chain of specs, which `sharding_constraints.py` inserts. In a dimension that
several mesh axes shard, the specs need an order. A dimension sharded over (a, b) is split into blocks over a, and each block over
b. An all-gather over b moves data only within the blocks of a; an all-gather over a alone moves all data. So if one axis is added
or removed, the other has to come first. All dimensions that edges connect use the same order. An all-to-all that moves several
axes from one dimension to another needs the same order in both: otherwise the array is permuted once more.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.shard.apply.sharding_constraints import ShardingConstraints, Spec
from penstock.shard.graph.axis_groups import AxisGroups, FirstUse, find_uses
from penstock.shard.graph.decisions import Graph, ReshardKey, reshard_key
from penstock.shard.mesh.resharding import Layout, MeshLinks, ReshardStep, union
from penstock.shard.search.costs import COLLECTIVE_FORMS, Assignment, project
from penstock.shard.trace.flat_program import FlatProgram, Op

_MATCHING_ROUNDS = 4
"""The most rounds in which the orders of dimensions that exchange axes are matched to each other."""
_MOST_COMBINED = 16
"""Devices along one mesh axis up to which the TPU compiler combines a large sum with its slice: seen with 2, 8 and 16, not 32."""

Order = dict[tuple[int, int], tuple[int, ...]]
"""(node, dimension) → indices of the mesh axes, major first."""


@dataclass(frozen=True)
class Layouts:
    """All layouts of a plan.

    Attributes:
      inputs: the storage layout of each input.
      outputs: the layout of each output. New state has the storage layout of the state that it replaces; other outputs keep the
        layout in which they were computed.
      sharding_constraints: the layouts inside of the step.
      used: index of the value of an input → its layout at its first non-elementwise operation.
      slices: index of the value of an input → the number of slices that loops take of it; 1 if they take none.
    """

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    sharding_constraints: ShardingConstraints
    used: Mapping[int, Spec]
    slices: Mapping[int, int]


def write_layouts(
    program: FlatProgram,
    groups: AxisGroups,
    graph: Graph,
    links: MeshLinks,
    assignment: Assignment,
    state: Mapping[int, int],
    split_from: float = math.inf,
) -> Layouts:
    """Write an assignment as partition specs.

    Args:
      state: index of each output that replaces an input → index of that input.
      split_from: the bytes from which the compiler splits a product that is summed and scattered (`CompilerModel.split_from`).
    """
    return _Writer(program, groups, graph, links, assignment, split_from, axis_orders(graph, links, assignment)).write(state)


@dataclass(frozen=True)
class _Writer:
    """The layouts of one assignment, with the order of mesh axes in each dimension."""

    program: FlatProgram
    groups: AxisGroups
    graph: Graph
    links: MeshLinks
    assignment: Assignment
    split_from: float
    orders: Order
    first_reader: dict[tuple[ReshardKey, Spec], int] = field(default_factory=dict)
    """(array, layout) → the first operation that reads it in this layout, and for which alone it is resharded."""

    def write(self, state: Mapping[int, int]) -> Layouts:
        """Write all layouts; `state` is as in `write_layouts`."""
        values = self.program.values
        inputs = tuple(self.spec(self.graph.leaf[value], range(len(values[value].shape))) for value in self.program.inputs)
        outputs: list[Spec] = []
        for index, value in enumerate(self.program.outputs):
            if index in state:
                outputs.append(inputs[state[index]])
            else:
                outputs.append(() if value is None else self.group_layout(value))
        operands: dict = {}
        results: dict = {}
        for op, node in zip(self.groups.non_elementwise, self.graph.op, strict=True):
            layout = self.assignment[node]
            is_constraint = op.primitive == "sharding_constraint"
            operands[op.path] = tuple(
                None if operand is None or not factors or is_constraint else self.operand_layouts(operand, node, factors, op)
                for operand, factors in zip(op.operands, op.rule.operands, strict=True)
            )
            result_layouts = []
            for result, factors in zip(op.results, op.rule.results, strict=True):
                reduced = [factor for factor in range(len(layout)) if factor not in factors] if op.fixed is None else []
                result_layouts.append(self.result_layouts(result, node, factors, reduced) if values[result].shape else None)
            results[op.path] = tuple(result_layouts)
        for group in self.groups.groups:
            for op in group.elementwise if group is not None else ():
                results[op.path] = tuple((self.group_layout(each),) if values[each].shape else None for each in op.results)
        # An input that only elementwise operations read has no layout in use: each of them reads it in the layout of its result.
        unused = set(self.graph.leaf) - {edge.value for edge in self.graph.edges if edge.kind == "use"}
        for loop in self.program.loops:
            # In the layout of its group, an operand is gathered once before the loop, not in each iteration.
            operands[loop.path] = tuple(
                None if each is None or each in unused or not values[each].shape else (self.group_layout(each),)
                for each in loop.operands
            )
        self.broadcast_uses(operands)
        uses = find_uses(self.program, self.groups)
        used = {value: self._layout_in_use(value, use) for value, use in uses.first.items()}
        return Layouts(inputs, tuple(outputs), ShardingConstraints(operands, results), used, uses.slices)

    def _layout_in_use(self, value: int, use: FirstUse) -> Spec:
        """Return the layout of an input at its first non-elementwise use, in the order of the input's own dimensions.

        The operand may have the input's dimensions merged, and be sharded further than the major one of them divides.
        """
        sizes = self.program.values[value].shape
        axes = self.spec(self.graph.op[use.index], map(use.factor, range(len(sizes))))
        return tuple(map(self._dividing, axes, sizes))

    def _dividing(self, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
        """Return the first mesh axes that together divide the size of a dimension."""
        length = dict(zip(self.links.names, self.links.sizes, strict=True))
        counts = itertools.accumulate((length[axis] for axis in axes), operator.mul)
        return tuple(axis for axis, count in zip(axes, counts, strict=True) if size % count == 0)

    def group_layout(self, value: int) -> Spec:
        """Return the layout of the axis group that a value belongs to."""
        return self.spec(self.graph.group[value], self.groups.dims[value])

    def operand_layouts(self, value: int, node: int, factors: tuple[int | None, ...], op: Op) -> tuple[Spec, ...]:
        """Return the chain of layouts of an operand.

        It starts with the layout of the operand's group, and ends with the operation's layout. Between them may be the layout of
        a reshard that several readers share. If it is resharded from there as for an earlier reader, it is resharded again, since
        the copy for that one is not kept.
        """
        dims, key, fallback = self.groups.dims[value], reshard_key(value, op), (node, factors)
        layouts = [project(dims, self.assignment[self.graph.group[value]])]
        last = self._layout_at_op(value, node, factors)
        shared = self.graph.shared_reshard.get(key)
        shared_layout = last if shared is None else project(dims, self.assignment[shared])
        if shared_layout != layouts[-1]:
            layouts += self.links.waypoints(layouts[-1], shared_layout, 0)
        chain = self._spec_chain(layouts, value, fallback)
        if shared_layout == last:
            return chain
        own = self._spec_chain([shared_layout, *self.links.waypoints(shared_layout, last, 0)], value, fallback)
        again = self.first_reader.setdefault((key, own[-1]), node) != node
        return (*chain, *own) if again else (*chain, *own[1:])

    def result_layouts(self, value: int, node: int, factors: tuple[int | None, ...], reduced: list[int]) -> tuple[Spec, ...]:
        """Return the chain of layouts of a result, from the layout of the operation to the layout of the result's group."""
        source = self._layout_at_op(value, node, factors)
        target = project(self.groups.dims[value], self.assignment[self.graph.group[value]])
        partial = union(tuple(self.assignment[node][factor] for factor in reduced))
        stops = list(self.links.waypoints(source, target, partial))
        sums = [step for step in self.links.reshard_steps(source, target, partial, 1) if step.kind in COLLECTIVE_FORMS]
        if sums and sums[0].kind == "reduce-scatter" and not self._combines(sums, value, node, factors, reduced):
            chain = stops[len(sums) - 1 :]
        else:
            chain = [*([source] if source != target else []), *stops]
        return self._spec_chain(chain, value, (node, factors))

    def _combines(
        self, sums: list[ReshardStep], value: int, node: int, factors: tuple[int | None, ...], reduced: list[int]
    ) -> bool:
        """Return whether compilers combine a full sum and its slice into one reduce-scatter. Then both are requested.

        If only the slice is requested, the partitioner may gather the operands instead. But a full sum over several axes stays
        one, unless its slices are along all of them, in the order in which they shard the dimension that is summed. A large one
        also stays where the compiler splits the product into parts that are sent while the next ones are computed.
        """
        axes = sums[0].axes
        if axes.bit_count() > 1 or len(sums) > 1:
            summed = [factor for factor in reduced if self.assignment[node][factor]]
            order = self._axes(node, summed[0], self.assignment[node][summed[0]])
            (spec,) = self._spec_chain([sums[0].after], value, (node, factors))
            if len(summed) > 1 or order not in [tuple(axis for axis in each if axis in order) for each in spec]:
                return False
        unreduced = self.program.values[value].bytes / self.links.shards(union(sums[0].after) & ~axes)
        return unreduced < self.split_from or (self.links.shards(axes) <= _MOST_COMBINED and axes.bit_count() == 1)

    def broadcast_uses(self, operands: dict) -> None:
        """Give broadcast operands of elementwise operations the layout of the result; add them to `operands`."""
        by_result = {op.results[0]: op for group in self.groups.groups if group is not None for op in group.elementwise}
        for value, result, dims in self.groups.broadcast_uses:
            op = by_result[result]
            at = tuple(None if dim is None else self.groups.dims[result][dim] for dim in dims)
            spec = self.spec(self.graph.group[result], at)
            before = operands.get(op.path, (None,) * len(op.operands))
            operands[op.path] = tuple((spec,) if each == value else old for each, old in zip(op.operands, before, strict=True))

    def spec(self, node: int, dims: Iterable[int | None]) -> Spec:
        """Return the spec of an array, given the dimension of a node that each of its dimensions belongs to."""
        return tuple(self._axes(node, dim, 0 if dim is None else self.assignment[node][dim]) for dim in dims)

    def _layout_at_op(self, value: int, node: int, factors: tuple[int | None, ...]) -> Layout:
        """Return the layout of a value at an operation, without the mesh axes of dimensions of size one."""
        layout, sizes = project(factors, self.assignment[node]), self.program.values[value].shape
        return tuple(mask if size > 1 else 0 for mask, size in zip(layout, sizes, strict=True))

    def _spec_chain(self, layouts: list[Layout], value: int, fallback: tuple[int, tuple[int | None, ...]]) -> tuple[Spec, ...]:
        """Write layouts as specs, with the order of axes in the group's dimensions.

        `fallback` has a node and its dimensions, for array dimensions that the group does not have.
        """
        group, dims = self.graph.group[value], self.groups.dims[value]
        specs = []
        for layout in layouts:
            spec = []
            for at, mask in enumerate(layout):
                node, dim = (group, dims[at]) if dims[at] is not None else (fallback[0], fallback[1][at])
                spec.append(self._axes(node, dim, mask))
            specs.append(tuple(spec))
        return tuple(dict.fromkeys(specs))

    def _axes(self, node: int, dim: int | None, mask: int) -> tuple[str, ...]:
        """Return the names of mesh axes, given as bits, in the order of a dimension of a node."""
        default = range(len(self.links.sizes))
        order = default if dim is None else self.orders.get((node, dim), default)
        return tuple(self.links.names[axis] for axis in order if mask >> axis & 1)


# The order of mesh axes in each dimension that several of them shard.


def axis_orders(graph: Graph, links: MeshLinks, assignment: Assignment) -> Order:
    """Find the order of mesh axes in each dimension, so that the fewest bytes are moved only because of the order.

    The user's order is kept where constraints give one.
    """
    dimension = graph.components
    orders = list(itertools.permutations(range(len(links.sizes))))
    wasted: dict[int, dict[tuple[int, ...], float]] = {}
    exchanged = []
    for edge in graph.edges:
        size = edge.bytes * edge.count
        for (at, a), (to, b) in itertools.product(enumerate(edge.source), enumerate(edge.target)):
            if a is None or b is None:
                continue
            before, after, one, other = assignment[edge.a][a], assignment[edge.b][b], dimension[edge.a, a], dimension[edge.b, b]
            if at == to and before and after and before != after:
                costs = wasted.setdefault(one, dict.fromkeys(orders, 0.0))
                for order in orders:
                    if not _nested(order, before, after):
                        costs[order] += size
            moved = before & after
            if at != to and one != other and moved.bit_count() > 1:
                exchanged.append((one, other, moved, size))
    # Among equally good orders, one for all dimensions: a sum over several axes can only be scattered in its own order of axes.
    preferred = min(orders, key=lambda order: sum(costs[order] for costs in wasted.values()))
    orders = [preferred, *(order for order in orders if order != preferred)]
    fixed_orders = _fixed_orders(graph, links)
    for dim, given in fixed_orders.items():
        # The user's order also holds for all connected dimensions that have no constraint of their own.
        costs = wasted.setdefault(dimension[dim], dict.fromkeys(orders, 0.0))
        for order in orders:
            if [axis for axis in order if axis in given] != list(given):
                costs[order] += float("inf")
    chosen = _match_orders(wasted, exchanged, orders)
    return {dim: chosen.get(number, orders[0]) for dim, number in dimension.items()} | fixed_orders


def _match_orders(
    wasted: dict[int, dict[tuple[int, ...], float]], exchanged: list[tuple[int, int, int, float]], orders: list[tuple[int, ...]]
) -> dict[int, tuple[int, ...]]:
    """Choose the best order of each set of connected dimensions, given the orders of the others, until nothing changes.

    Args:
      wasted: bytes that are moved only because of an order, for each set of connected dimensions and each order.
      exchanged: (one set, another set, bits of the axes that an all-to-all moves between them, bytes).
    """
    partners: dict[int, list[tuple[int, int, float]]] = {}
    for one, other, moved, size in exchanged:
        partners.setdefault(one, []).append((other, moved, size))
        partners.setdefault(other, []).append((one, moved, size))
    free = dict.fromkeys(orders, 0.0)
    chosen = {root: min(orders, key=wasted.get(root, free).__getitem__) for root in {**wasted, **partners}}

    def cost(root: int, order: tuple[int, ...]) -> float:
        return wasted.get(root, free)[order] + sum(
            size for other, moved, size in partners.get(root, ()) if _in_order(order, moved) != _in_order(chosen[other], moved)
        )

    for _ in range(_MATCHING_ROUNDS):
        before = dict(chosen)
        for root in chosen:
            chosen[root] = min(orders, key=lambda order: (cost(root, order), order != chosen[root]))
        if chosen == before:
            break
    return chosen


def _fixed_orders(graph: Graph, links: MeshLinks) -> Order:
    """Return the orders of the dimensions for which the user's constraints name several axes."""
    return {
        (number, dim): tuple(links.names.index(axis) for axis in entry)
        for number, node in enumerate(graph.nodes)
        for dim, entry in enumerate(node.fixed or ())
        if entry and len(entry) > 1
    }


def _nested(order: tuple[int, ...], before: int, after: int) -> bool:
    """Return whether one set of axes, in this order, is a prefix of the other."""
    first, second = _in_order(order, before), _in_order(order, after)
    shorter = min(len(first), len(second))
    return first[:shorter] == second[:shorter]


def _in_order(order: tuple[int, ...], axes: int) -> list[int]:
    """Return the indices of a set of axes, given as bits, in an order."""
    return [axis for axis in order if axes >> axis & 1]
