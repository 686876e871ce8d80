"""Write an assignment as partition specs of the inputs and outputs, and of the operands and results inside of the step.

An operand or a result inside of the step has a chain of specs, which `sharding_constraints.py` inserts.
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

_MOST_COMBINED = 16
"""Devices along one mesh axis up to which the TPU compiler combines a large sum with its slice: seen with 2, 8 and 16, not 32."""


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
    return _Writer(program, groups, graph, links, assignment, split_from).write(state)


@dataclass(frozen=True)
class _Writer:
    """The layouts of one assignment, with the order of mesh axes in each dimension."""

    program: FlatProgram
    groups: AxisGroups
    graph: Graph
    links: MeshLinks
    assignment: Assignment
    split_from: float
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
        one, unless its slices are along all of them, and they shard one dimension that is summed. A large one also stays where
        the compiler splits the product into parts that are sent while the next ones are computed.
        """
        axes = sums[0].axes
        summed = [factor for factor in reduced if self.assignment[node][factor]]
        if len(sums) > 1 or (axes.bit_count() > 1 and len(summed) > 1):
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
        """Return the names of mesh axes, given as bits, in the order in which they shard a dimension of a node."""
        fixed = self.graph.nodes[node].fixed
        given = fixed[dim] if fixed is not None and dim is not None else None
        if given and self.links.bits(given) == mask:
            return given  # the user's order
        axes = self.links.axes(mask)
        return axes[::-1] if self.links.last_is_major else axes
