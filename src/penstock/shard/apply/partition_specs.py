"""From decisions to layouts: of the inputs and outputs, and inside of the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.shard.apply.axis_order import axis_orders
from penstock.shard.apply.sharding_constraints import ShardingConstraints, Spec
from penstock.shard.graph.axis_groups import AxisGroups
from penstock.shard.graph.decisions import Graph
from penstock.shard.graph.first_use import find_first_uses
from penstock.shard.mesh.resharding import Layout, MeshLinks
from penstock.shard.search.problem import Assignment
from penstock.shard.trace.flat_program import FlatProgram


@dataclass(frozen=True)
class Layouts:
    """All layouts of a plan.

    Attributes:
      inputs: of each input, how it is stored.
      outputs: of each output: what replaces an input is stored as that is; everything else comes as it was computed.
      steering: the layouts inside of the step.
      used: of inputs, by the number of their value, the layout in which the first operation that computes with them has them.
    """

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    sharding_constraints: ShardingConstraints
    used: Mapping[int, Spec]


def write_layouts(
    program: FlatProgram, groups: AxisGroups, graph: Graph, links: MeshLinks, assignment: Assignment, state: Mapping[int, int]
) -> Layouts:
    """Write decisions out.

    Args:
      program, groups, graph, links: what was searched.
      assignment: the decisions.
      state: of each output that replaces an input, by place, the place of the input.
    """
    return _Writer(program, groups, graph, links, assignment).write(state)


class _Writer:
    def __init__(self, program: FlatProgram, groups: AxisGroups, graph: Graph, links: MeshLinks, assignment: Assignment):
        self.program, self.groups, self.graph, self.links, self.assignment = program, groups, graph, links, assignment
        self.orders = axis_orders(graph, links, assignment)

    def write(self, state: Mapping[int, int]) -> Layouts:
        inputs = tuple(
            self.spec(self.graph.leaf[value], range(len(self.program.values[value].shape))) for value in self.program.inputs
        )
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
            prescribed = op.primitive == "sharding_constraint"
            operands[op.path] = tuple(
                None if operand is None or not factors or prescribed else self.operand_layouts(operand, node, factors, op.count)
                for operand, factors in zip(op.operands, op.rule.operands, strict=True)
            )
            result_layouts = []
            for result, factors in zip(op.results, op.rule.results, strict=True):
                reduced = [factor for factor in range(len(layout)) if factor not in factors] if op.fixed is None else []
                result_layouts.append(
                    self.result_layouts(result, node, factors, reduced) if self.program.values[result].shape else None
                )
            results[op.path] = tuple(result_layouts)
        for group in self.groups.groups:
            for op in group.elementwise if group is not None else ():
                results[op.path] = tuple(
                    (self.group_layout(each),) if self.program.values[each].shape else None for each in op.results
                )
        for loop in self.program.loops:
            # Where what a loop works on is to be gathered before it, and not in each of its turns.
            operands[loop.path] = tuple(
                None if each is None or not self.program.values[each].shape else (self.group_layout(each),)
                for each in loop.operands
            )
        self.broadcast_uses(operands)
        return Layouts(inputs, tuple(outputs), ShardingConstraints(operands, results), self._used())

    def _used(self) -> dict[int, Spec]:
        """Of inputs the layout in which the first operation that computes with them has them."""
        return {
            value: ((),) * use.scan_dims + self.spec(self.graph.op[use.index], use.factors)
            for value, use in find_first_uses(self.program, self.groups).items()
        }

    def group_layout(self, value: int) -> Spec:
        """The layout in which a value is kept."""
        return self.spec(self.graph.group[value], self.groups.dims[value])

    def operand_layouts(self, value: int, node: int, factors: tuple[int | None, ...], count: float) -> tuple[Spec, ...]:
        """The layouts that an operand goes through: from its group's, by that of the copy for all readers, to the operation's."""
        dims = self.groups.dims[value]
        layouts_on_way = [self._layout(self.graph.group[value], dims)]
        if (value, count) in self.graph.shared_reshard:
            layouts_on_way.append(self._layout(self.graph.shared_reshard[value, count], dims))
        layouts_on_way.append(self._only_large(self._layout(node, factors), value))
        layouts = layouts_on_way[:1]
        for stop in layouts_on_way[1:]:
            if stop != layouts[-1]:
                layouts += self.links.waypoints(layouts[-1], stop, 0)
        return self._spec_chain(layouts, value, (node, factors))

    def result_layouts(self, value: int, node: int, factors: tuple[int | None, ...], reduced: list[int]) -> tuple[Spec, ...]:
        """The layouts that a result goes through: from the operation's to its group's."""
        source = self._only_large(self._layout(node, factors), value)
        target = self._layout(self.graph.group[value], self.groups.dims[value])
        partial = 0
        for factor in reduced:
            partial |= self.assignment[node][factor]
        # Summed first, and cut afterwards, which compilers make one reduce-scatter of. Asked for the parts at once, the
        # partitioner may gather the operands instead.
        layouts_on_way = list(self.links.waypoints(source, target, partial))
        if source != target:
            layouts_on_way = [source, *layouts_on_way]
        return self._spec_chain(layouts_on_way, value, (node, factors))

    def broadcast_uses(self, operands: dict) -> None:
        """Operands of elementwise operations that are stored, or that are small, in the layout of the result."""
        by_result = {op.results[0]: op for group in self.groups.groups if group is not None for op in group.elementwise}
        for value, result, dims in self.groups.broadcast_uses:
            op = by_result[result]
            at = tuple(None if dim is None else self.groups.dims[result][dim] for dim in dims)
            spec = self.spec(self.graph.group[result], at)
            before = operands.get(op.path, (None,) * len(op.operands))
            operands[op.path] = tuple((spec,) if each == value else old for each, old in zip(op.operands, before, strict=True))

    def spec(self, node: int, dims: Iterable[int | None]) -> Spec:
        return tuple(self._axes(node, dim, 0 if dim is None else self.assignment[node][dim]) for dim in dims)

    def _layout(self, node: int, dims: tuple[int | None, ...]) -> Layout:
        return tuple(0 if dim is None else self.assignment[node][dim] for dim in dims)

    def _only_large(self, layout: Layout, value: int) -> Layout:
        return tuple(mask if size > 1 else 0 for mask, size in zip(layout, self.program.values[value].shape, strict=True))

    def _spec_chain(
        self, layouts_on_way: list[Layout], value: int, fallback: tuple[int, tuple[int | None, ...]]
    ) -> tuple[Spec, ...]:
        """Layouts with the names of axes, in the order that the dimension has wherever the value goes."""
        group, dims = self.graph.group[value], self.groups.dims[value]
        specs = []
        for stop in layouts_on_way:
            spec = []
            for at, mask in enumerate(stop):
                node, dim = (group, dims[at]) if dims[at] is not None else (fallback[0], fallback[1][at])
                spec.append(self._axes(node, dim, mask))
            specs.append(tuple(spec))
        return tuple(dict.fromkeys(specs))

    def _axes(self, node: int, dim: int | None, mask: int) -> tuple[str, ...]:
        order = self.orders.get((node, dim), range(len(self.links.sizes))) if dim is not None else range(len(self.links.sizes))
        return tuple(self.links.names[axis] for axis in order if mask >> axis & 1)
