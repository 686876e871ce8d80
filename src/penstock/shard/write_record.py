"""Write the result of a search, or a baseline, as a `PlanRecord`.

In: the decisions, and the step. Out: the layout of each leaf, the sharding constraints inside of the step, and the predicted
costs of the plan and of the baselines.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.shard.apply.partition_specs import write_layouts
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.record import LeafLayout, PlanRecord
from penstock.shard.search.cost import Cost, axis_work, predict_cost
from penstock.shard.search.cost_model import Assignment
from penstock.shard.search.mesh_search import MeshPlan, PreparedMesh
from penstock.shard.trace.step import TracedStep


def write_record(
    prepared: PreparedMesh,
    assignment: Assignment,
    baselines: Mapping[str, MeshPlan],
    traced: TracedStep,
    hardware: Hardware,
    limit: int,
) -> PlanRecord:
    """Write decisions as a record.

    Args:
      prepared: the mesh.
      assignment: the decisions: those of a search, or of a baseline.
      baselines: the baselines to compare with, each on its own mesh.
      traced: the step.
      hardware: the device.
      limit: bytes that one device may hold.
    """
    model, problem, roles = prepared.model, prepared.problem, prepared.roles
    split_from = problem.compiler.split_from
    layouts = write_layouts(model.program, model.groups, model.graph, problem.links, assignment, traced.state, split_from)

    def cost(mesh: PreparedMesh, decisions: Assignment) -> Cost:
        return predict_cost(mesh.problem, decisions, roles, mesh.model.inputs, model.program.unknown)

    uses = [(layouts.used.get(value), layouts.slices[value]) for value in model.program.inputs]
    inputs = tuple(
        LeafLayout(leaf.path, leaf.shape, str(leaf.dtype), role, spec, used, leaf.weak, slices)
        for leaf, role, spec, (used, slices) in zip(traced.inputs, roles, layouts.inputs, uses, strict=True)
    )
    outputs = tuple(
        LeafLayout(leaf.path, leaf.shape, str(leaf.dtype), "output", spec, None)
        for leaf, spec in zip(traced.outputs, layouts.outputs, strict=True)
    )
    return PlanRecord(
        mesh_shape=dict(prepared.mesh_shape),
        hardware=hardware.name,
        platform=problem.compiler.name,
        limit=limit,
        inputs=inputs,
        outputs=outputs,
        state=dict(traced.state),
        sharding_constraints=layouts.sharding_constraints,
        cost=cost(prepared, assignment),
        axis_work=axis_work(problem, assignment, prepared.batch),
        baselines={name: cost(each.prepared, each.candidate.assignment) for name, each in baselines.items()},
        fingerprint=traced.fingerprint(),
        numbers=traced.numbers(),
    )
