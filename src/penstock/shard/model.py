"""A traced step with all that the planner derives from it, whatever the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.shard.axes import Groups, groups_of
from penstock.shard.fold import Folded, fold
from penstock.shard.graph import Graph, graph_of
from penstock.shard.hardware import Hardware
from penstock.shard.layout import Links
from penstock.shard.memory import Lifetimes, lifetimes
from penstock.shard.pins import Fixed
from penstock.shard.program import Program
from penstock.shard.search import Problem
from penstock.shard.trace import Traced


@dataclass(frozen=True)
class Model:
    """A step as the planner sees it."""

    program: Program
    groups: Groups
    graph: Graph
    folded: Folded
    lives: Lifetimes

    @property
    def inputs(self) -> tuple[int, ...]:
        """The node of each input."""
        return tuple(self.graph.leaf[value] for value in self.program.inputs)


def model_of(traced: Traced, pins: Mapping[int, Fixed]) -> Model:
    """Look at a step.

    Args:
      traced: the step.
      pins: inputs, by place, whose layout is prescribed.
    """
    program = traced.program
    groups = groups_of(program)
    graph = graph_of(program, groups, traced.state, pins)
    return Model(program, groups, graph, fold(graph), lifetimes(program, graph, frozenset(traced.state)))


def problem_of(model: Model, mesh: Mapping[str, int], hardware: Hardware) -> Problem:
    """What is to be searched, on a mesh."""
    names: Sequence[str] = tuple(mesh)
    links = Links(
        tuple(names),
        tuple(mesh.values()),
        tuple(hardware.bandwidth([name]) for name in names),
        tuple(hardware.latency([name]) for name in names),
    )
    program = model.program
    stored = tuple((model.graph.leaf[value], program.values[value].bytes) for value in program.inputs)
    return Problem(model.graph, model.folded, links, hardware, model.lives, stored)
