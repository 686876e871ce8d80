"""Search each candidate mesh shape, and take the best plan of all.

In: a traced step, candidate mesh shapes, the hardware, and what the user prescribes. Out: a mesh shape, and the decisions for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.shard.graph.constraints import FixedLayout, fixed_layouts
from penstock.shard.graph.roles import infer_roles
from penstock.shard.graph.step_model import StepModel, build_step_model
from penstock.shard.mesh.compiler_models import CompilerModel
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.search.baselines import find_baselines
from penstock.shard.search.cost_model import Assignment
from penstock.shard.search.problem import Problem, build_problem
from penstock.shard.search.solver import Candidate, choose, evaluate, solve
from penstock.shard.search.weight_pairs import WeightPairs, find_weight_pairs
from penstock.shard.trace.step import TracedStep


@dataclass(frozen=True)
class PreparedMesh:
    """A mesh to search, with its cost tables.

    Attributes:
      model: the step, the same for each mesh unless constraints differ.
      problem: the search problem on this mesh.
      mesh_shape: sizes of the mesh axes.
      roles: the role of each input.
      batch: the nodes of the inputs that are a batch.
      baselines: name → decisions of a baseline on this mesh.
    """

    model: StepModel
    problem: Problem
    mesh_shape: dict[str, int]
    roles: Sequence[str]
    batch: Sequence[int]
    baselines: dict[str, Assignment]


@dataclass(frozen=True)
class MeshPlan:
    """Decisions for one mesh.

    Attributes:
      prepared: the mesh, with its search problem.
      candidate: the decisions.
    """

    prepared: PreparedMesh
    candidate: Candidate


def prepare_meshes(
    traced: TracedStep,
    shapes: Sequence[dict[str, int]],
    hardware: Hardware,
    constraints: Mapping[str, Any] | None,
    given_roles: Mapping[int, str],
    compiler: CompilerModel,
) -> list[PreparedMesh]:
    """Build the search problem of each mesh that the user's constraints allow.

    Args:
      traced: the step.
      shapes: candidate mesh shapes.
      hardware: the devices.
      constraints: path pattern → `PartitionSpec`.
      given_roles: index of an input → the role that the user gives it.
      compiler: how the compiler that decides fuses and uses memory.

    Returns:
      The meshes that the constraints allow, in the order of the shapes.

    Raises:
      TypeError, ValueError: the constraints allow no shape; the error is that of the first shape.
    """
    prepared, errors = [], []
    model: StepModel | None = None
    last: dict[int, FixedLayout] = {}
    roles: list[str] = []
    batch: list[int] = []
    pairs: WeightPairs | None = None
    for shape in shapes:
        try:
            fixed = fixed_layouts(constraints, traced.inputs, shape)
        except ValueError as error:
            errors.append(error)
            continue
        if model is None or fixed != last:
            model, last = build_step_model(traced, fixed, compiler), fixed
            inferred = infer_roles(model, traced.state, traced.arguments)
            roles = [given_roles.get(index, role) for index, role in enumerate(inferred)]
            batch = [node for node, role in zip(model.inputs, roles, strict=True) if role == "batch"]
            pairs = find_weight_pairs(model, batch)
        problem = build_problem(model, shape, hardware, batch)
        baselines = find_baselines(problem, model, roles, pairs)
        prepared.append(PreparedMesh(model, problem, shape, roles, batch, baselines))
    if not prepared:
        raise errors[0]
    return prepared


def search_meshes(prepared: Sequence[PreparedMesh], limit: float) -> MeshPlan:
    """Return the best plan of all meshes: the fastest of those within the limit, else the one of least memory.

    Args:
      prepared: the meshes.
      limit: bytes that one device may hold.

    Returns:
      The best plan, with its mesh. It exceeds the limit if every plan that was found does.
    """
    plans: list[MeshPlan] = []
    for each in prepared:
        to_beat = min((plan.candidate.seconds for plan in plans if plan.candidate.memory <= limit), default=math.inf)
        plans.append(MeshPlan(each, solve(each.problem, limit, list(each.baselines.values()), to_beat)))
    return plans[choose([plan.candidate for plan in plans], limit)]


def best_baselines(prepared: Sequence[PreparedMesh], limit: float) -> dict[str, MeshPlan]:
    """Return each baseline on the mesh on which it is best: the fastest within the limit, else the one of least memory.

    Args:
      prepared: the meshes.
      limit: bytes that one device may hold.
    """
    by_name: dict[str, list[MeshPlan]] = {}
    for each in prepared:
        for name, assignment in each.baselines.items():
            by_name.setdefault(name, []).append(MeshPlan(each, evaluate(each.problem, assignment)))
    return {name: plans[choose([plan.candidate for plan in plans], limit)] for name, plans in by_name.items()}
