"""A traced step with all that the planner derives from it, whatever the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.shard.graph.axis_groups import AxisGroups, find_axis_groups
from penstock.shard.graph.folding import Folded, fold
from penstock.shard.graph.decisions import Graph, build_graph
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.mesh.resharding import MeshLinks
from penstock.shard.graph.live_ranges import LiveRanges, find_live_ranges
from penstock.shard.graph.constraints import Fixed
from penstock.shard.trace.flat_program import FlatProgram
from penstock.shard.search.problem import Problem
from penstock.shard.trace.step import TracedStep


@dataclass(frozen=True)
class StepModel:
    """A step as the planner sees it."""

    program: FlatProgram
    groups: AxisGroups
    graph: Graph
    folded: Folded
    live_ranges: LiveRanges

    @property
    def inputs(self) -> tuple[int, ...]:
        """The node of each input."""
        return tuple(self.graph.leaf[value] for value in self.program.inputs)


def build_step_model(traced: TracedStep, pins: Mapping[int, Fixed]) -> StepModel:
    """Look at a step.

    Args:
      traced: the step.
      pins: inputs, by place, whose layout is prescribed.
    """
    program = traced.program
    groups = find_axis_groups(program)
    graph = build_graph(program, groups, traced.state, pins)
    return StepModel(program, groups, graph, fold(graph), find_live_ranges(program, graph, frozenset(traced.state)))


def build_problem(model: StepModel, mesh: Mapping[str, int], hardware: Hardware) -> Problem:
    """What is to be searched, on a mesh."""
    names: Sequence[str] = tuple(mesh)
    links = MeshLinks(
        tuple(names),
        tuple(mesh.values()),
        tuple(hardware.bandwidth([name]) for name in names),
        tuple(hardware.latency([name]) for name in names),
    )
    program = model.program
    stored = tuple((model.graph.leaf[value], program.values[value].bytes) for value in program.inputs)
    return Problem(model.graph, model.folded, links, hardware, model.live_ranges, stored)
