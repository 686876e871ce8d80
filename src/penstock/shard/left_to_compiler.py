"""Write plans that store arguments in a layout and leave most of the step to the compiler, as expert users of `jax.jit` do.

In: the baselines, on their meshes, and a plan with its layouts inside of the step. Out: stored layouts, and plans whose layouts
inside of the step the compiler chooses. They cost what the compiled program says, because their collectives are not predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from penstock.shard.apply.sharding_constraints import ShardingConstraints
from penstock.shard.graph.batch_dims import find_batch_dims
from penstock.shard.hlo.analysis import Measured
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.mesh.resharding import sent_times, union
from penstock.shard.record import LeafLayout, PlanRecord
from penstock.shard.search.baselines import FSDP, MEGATRON, MEGATRON_FSDP, by_largest_dim, split_storage
from penstock.shard.search.cost import PlannedCollective
from penstock.shard.search.cost_model import Assignment
from penstock.shard.search.mesh_search import MeshPlan, PreparedMesh

LEFT_TO_COMPILER = (
    "the compiler chooses the layouts inside of the step, because plans that give them do not fit, or are slower once compiled; "
    "the cost is that of the compiled program"
)


def stored_layouts(baselines: Mapping[str, MeshPlan]) -> Iterator[tuple[PreparedMesh, Assignment]]:
    """Yield the layouts in which people store the arguments of a step that they leave to the compiler.

    They are those of the baselines that shard weights; the largest dimension of each leaf; and splits of each weight over some of
    the mesh axes of FSDP, while the others shard the batch.

    Args:
      baselines: the baselines by name, each on its mesh.
    """
    for name in (FSDP, MEGATRON, MEGATRON_FSDP):
        if name in baselines:
            prepared = baselines[name].prepared
            yield prepared, baselines[name].candidate.assignment
            if name == FSDP:
                yield prepared, by_largest_dim(prepared.problem, prepared.model, prepared.roles)
    if FSDP in baselines:
        prepared = baselines[FSDP].prepared
        for assignment in split_storage(prepared.problem, prepared.model, prepared.roles):
            yield prepared, assignment


def leave_to_compiler(plan: PlanRecord, prepared: PreparedMesh, assignment: Assignment) -> list[PlanRecord]:
    """Return a plan without its layouts inside of the step, and the same with weights gathered at the start of the step.

    In both, the rows of the batch, which are stored sharded over all axes, are gathered at the start over those that do not shard
    the batch inside of the step.

    Args:
      plan: the plan.
      prepared, assignment: its mesh and its decisions.
    """
    rows = _axes_of_rows(prepared, assignment)
    made: list[PlanRecord] = []
    for gathered in (False, True):
        inputs = tuple(_brought(leaf, rows, gathered) for leaf in plan.inputs)
        at_start = tuple(None if leaf.used == leaf.stored else leaf.used for leaf in inputs)
        constraints = ShardingConstraints(at_start=at_start)
        if all(constraints != each.sharding_constraints for each in made):
            remarks = (*plan.remarks, LEFT_TO_COMPILER)
            made.append(replace(plan, inputs=inputs, sharding_constraints=constraints, remarks=remarks))
    return made


def _axes_of_rows(prepared: PreparedMesh, assignment: Assignment) -> set[str]:
    """Return the mesh axes that shard the batch inside of the step."""
    problem, axes = prepared.problem, 0
    for node, dims in find_batch_dims(problem.graph, prepared.batch).items():
        if node not in problem.pinned:
            axes |= union(tuple(assignment[node][dim] for dim in dims))
    return set(problem.links.axes(axes))


def _brought(leaf: LeafLayout, rows: set[str], gathered: bool) -> LeafLayout:
    """Return a leaf whose layout in use is that to which it is brought at the start, or None where the compiler chooses it."""
    if leaf.role == "batch":
        return replace(leaf, used=tuple(tuple(axis for axis in entry if axis in rows) for entry in leaf.stored))
    return leaf if gathered and leaf.role == "parameters" else replace(leaf, used=None)


def with_cost_of(plan: PlanRecord, measured: Measured, hardware: Hardware) -> PlanRecord:
    """Return a plan whose cost is that of its compiled program, by the same model as a predicted one. Nothing is hidden.

    Args:
      plan: the plan, with the cost that was predicted for other layouts inside of the step.
      measured: the compiler's figures.
      hardware: the device.
    """
    collectives = []
    for each in measured.collectives:
        sent = each.bytes_on_wire * each.count
        times = sent_times(each.kind, hardware.reduce_scatters)
        seconds = times * sent / hardware.bandwidth(each.axes) + hardware.latency(each.axes) * each.count
        collectives.append(PlannedCollective(each.kind, each.axes, each.count, sent, seconds, hidden=0.0))
    work = measured.flops / plan.cost.flops if plan.cost.flops else 1.0
    # Count added FLOPs at the peak, and keep the predicted memory traffic.
    added = plan.cost.flops_seconds * (work - 1.0)
    cost = replace(
        plan.cost,
        compute=max(0.0, plan.cost.compute + added),
        flops=measured.flops,
        flops_seconds=plan.cost.flops_seconds * work,
        collectives=tuple(sorted(_merged(collectives), key=lambda each: -each.seconds)),
        memory=replace(plan.cost.memory, activations=max(0, measured.memory - plan.cost.memory.arguments)),
        unknown=(*plan.cost.unknown, *measured.unknown),
    )
    return replace(plan, cost=cost, checked=measured)


def _merged(collectives: list[PlannedCollective]) -> list[PlannedCollective]:
    """Return the sums of collectives of one kind over the same axes."""
    totals: dict[tuple[str, tuple[str, ...]], PlannedCollective] = {}
    for each in collectives:
        so_far = totals.get((each.kind, each.axes), replace(each, count=0.0, bytes_on_wire=0.0, seconds=0.0))
        totals[each.kind, each.axes] = replace(
            so_far,
            count=so_far.count + each.count,
            bytes_on_wire=so_far.bytes_on_wire + each.bytes_on_wire,
            seconds=so_far.seconds + each.seconds,
        )
    return list(totals.values())
