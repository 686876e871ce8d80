"""Derive from a traced step all that does not depend on the mesh: axis groups, decisions, folded layers and live ranges."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from penstock.shard.graph.axis_groups import AxisGroups, find_axis_groups
from penstock.shard.graph.constraints import FixedLayout
from penstock.shard.graph.decisions import FoldedGraph, Graph, build_graph, fold_layers
from penstock.shard.graph.fusion import fuse, hbm_traffic
from penstock.shard.graph.live_ranges import LiveRanges, find_live_ranges
from penstock.shard.mesh.compiler_models import CompilerModel
from penstock.shard.trace.flat_program import CONTRACTIONS, FlatProgram, Op
from penstock.shard.trace.rewriting import AS_WRITTEN, Rewriting
from penstock.shard.trace.step import TracedStep


@dataclass(frozen=True)
class StepModel:
    """A step with everything that the search needs and that does not depend on the mesh.

    Attributes:
      program: the step as a flat program.
      groups: its axis groups.
      graph: its decisions.
      folded: the decisions with repeated layers folded.
      live_ranges: the operations during which each array is in memory.
      compiler: how the compiler fuses and uses memory.
      rewriting: what was changed in the step.
    """

    program: FlatProgram
    groups: AxisGroups
    graph: Graph
    folded: FoldedGraph
    live_ranges: LiveRanges
    compiler: CompilerModel
    rewriting: Rewriting = AS_WRITTEN

    @functools.cached_property
    def inputs(self) -> tuple[int, ...]:
        """Return the index of the node of each input."""
        return tuple(self.graph.leaf[value] for value in self.program.inputs)

    @functools.cached_property
    def products(self) -> frozenset[int]:
        """Return the nodes of the products."""
        ops, nodes = self.program.ops, self.graph.nodes
        return frozenset(node for node in self.graph.op if ops[nodes[node].label].primitive in CONTRACTIONS)

    @functools.cached_property
    def operand_readers(self) -> dict[int, set[int]]:
        """Return, for each node whose value operations read, the nodes of these operations."""
        readers: dict[int, set[int]] = defaultdict(set)
        for edge in self.graph.edges:
            if edge.kind == "operand":
                readers[edge.a].add(edge.b)
        return dict(readers)


def build_step_model(
    traced: TracedStep, fixed: Mapping[int, FixedLayout], compiler: CompilerModel, runs_by: CompilerModel | None = None
) -> StepModel:
    """Build the model of a step.

    Args:
      fixed: layouts that the user prescribes for inputs, by the index of the input.
      compiler: the compiler that decides whether the step fits.
      runs_by: the compiler of the device, whose fusions decide the time of the step; None: the same.
    """
    dense = (runs_by or compiler).writes_dense
    ops = [_adapted(op, traced.program, compiler, dense) for op in traced.program.ops]
    program = replace(traced.program, ops=ops)
    groups = find_axis_groups(program)
    fusion = fuse(program, frozenset(traced.state), compiler)
    fusion_in_time = fusion if runs_by in (None, compiler) else fuse(program, frozenset(traced.state), runs_by)
    graph = build_graph(program, groups, traced.state, fixed, hbm_traffic(program, fusion_in_time), compiler)
    live = find_live_ranges(program, graph, fusion)
    return StepModel(program, groups, graph, fold_layers(graph), live, compiler, traced.rewriting)


def _adapted(op: Op, program: FlatProgram, compiler: CompilerModel, dense: Collection[str]) -> Op:
    """Return an operation as a compiler runs it: with its rule there, and a ragged product for all groups if it is dense."""
    if op.rule.gathered:
        op = replace(op, rule=op.rule.on(compiler.name))
    sizes = op.operands[2] if op.primitive == "ragged_dot_general" and op.primitive in dense else None
    return op if sizes is None else replace(op, flops=op.flops * program.values[sizes].shape[-1])
