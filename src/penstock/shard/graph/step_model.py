"""A traced step with all that the planner derives from it, whatever the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.shard.graph.axis_groups import AxisGroups, find_axis_groups
from penstock.shard.graph.constraints import FixedLayout
from penstock.shard.graph.decisions import Graph, build_graph
from penstock.shard.graph.folding import FoldedGraph, fold_layers
from penstock.shard.graph.live_ranges import LiveRanges, find_live_ranges
from penstock.shard.trace.flat_program import FlatProgram
from penstock.shard.trace.step import TracedStep


@dataclass(frozen=True)
class StepModel:
    """A step as the planner sees it."""

    program: FlatProgram
    groups: AxisGroups
    graph: Graph
    folded: FoldedGraph
    live_ranges: LiveRanges

    @property
    def inputs(self) -> tuple[int, ...]:
        """The node of each input."""
        return tuple(self.graph.leaf[value] for value in self.program.inputs)


def build_step_model(traced: TracedStep, fixed: Mapping[int, FixedLayout]) -> StepModel:
    """Look at a step.

    Args:
      traced: the step.
      pins: inputs, by place, whose layout is prescribed.
    """
    program = traced.program
    groups = find_axis_groups(program)
    graph = build_graph(program, groups, traced.state, fixed)
    return StepModel(program, groups, graph, fold_layers(graph), find_live_ranges(program, graph, frozenset(traced.state)))
