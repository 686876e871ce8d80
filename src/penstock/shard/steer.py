"""From decisions to layouts: of the inputs, and inside of the step."""

from __future__ import annotations

from penstock.shard.apply import Spec, Steering
from penstock.shard.axes import Groups
from penstock.shard.graph import Graph
from penstock.shard.layout import Layout, Links
from penstock.shard.program import Program
from penstock.shard.search import Assignment


def input_specs(program: Program, groups: Groups, graph: Graph, links: Links, assignment: Assignment) -> list[Spec]:
    """Of each input the layout in which it is stored.

    In a dimension that several axes shard, those in which the input is used come first: what has to be gathered before use is then one
    block of the dimension on each device, and is gathered as it is.
    """
    specs = []
    for value in program.inputs:
        layout = assignment[graph.leaf[value]]
        used = _of_value(groups, graph, assignment, value)
        specs.append(tuple((*links.axes(mask & use), *links.axes(mask & ~use)) for mask, use in zip(layout, used, strict=True)))
    return specs


def output_specs(
    program: Program, groups: Groups, graph: Graph, links: Links, assignment: Assignment, state: dict[int, int], inputs: list[Spec]
) -> list[Spec]:
    """Of each output: what it replaces is stored as before; everything else comes as it was computed."""
    specs: list[Spec] = []
    for place, value in enumerate(program.outputs):
        if place in state:
            specs.append(inputs[state[place]])
        elif value is None:
            specs.append(())
        else:
            specs.append(_spec(links, _of_value(groups, graph, assignment, value)))
    return specs


def steering_of(program: Program, groups: Groups, graph: Graph, links: Links, assignment: Assignment) -> Steering:
    """The layouts that are written into the step: at each operation that is not elementwise, of what it reads and what it makes."""
    operands: dict = {}
    results: dict = {}
    for op, node in zip(groups.anchors, graph.op, strict=True):
        layout = assignment[node]
        wanted: list[tuple[Spec, ...] | None] = []
        for operand, factors in zip(op.operands, op.rule.operands, strict=True):
            if operand is None or not factors or op.primitive == "sharding_constraint":
                wanted.append(None)
                continue
            home = _spec(links, _of_value(groups, graph, assignment, operand))
            there = _spec(links, tuple(0 if factor is None else layout[factor] for factor in factors))
            there = _only_large(there, program.values[operand].shape)
            wanted.append((home,) if there == home else (home, there))
        operands[op.path] = tuple(wanted)
        made: list[tuple[Spec, ...] | None] = []
        for result, factors in zip(op.results, op.rule.results, strict=True):
            shape = program.values[result].shape
            home = _spec(links, _of_value(groups, graph, assignment, result))
            here = _only_large(_spec(links, tuple(0 if factor is None else layout[factor] for factor in factors)), shape)
            partial = any(layout[factor] for factor in range(len(layout)) if factor not in factors)
            made.append(None if not shape else (home,) if partial or here == home else (here, home))
        results[op.path] = tuple(made)
    by_result = {op.results[0]: op for group in groups.groups if group is not None for op in group.elementwise}
    for value, result, dims in groups.spread:
        op = by_result[result]
        home = _of_value(groups, graph, assignment, result)
        spec = _spec(links, tuple(0 if dim is None else home[dim] for dim in dims))
        before = operands.get(op.path, (None,) * len(op.operands))
        operands[op.path] = tuple((spec,) if each == value else old for each, old in zip(op.operands, before, strict=True))
    return Steering(operands, results)


def _of_value(groups: Groups, graph: Graph, assignment: Assignment, value: int) -> Layout:
    layout = assignment[graph.group[value]]
    return tuple(0 if dim is None else layout[dim] for dim in groups.dims[value])


def _spec(links: Links, layout: Layout) -> Spec:
    return tuple(links.axes(mask) for mask in layout)


def _only_large(spec: Spec, shape: tuple[int, ...]) -> Spec:
    return tuple(entry if size > 1 else () for entry, size in zip(spec, shape, strict=True))
