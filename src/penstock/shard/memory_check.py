"""Enforce the memory limit.

In: a plan record, and functions that compile a plan and search again. Out: a record that fits the limit. A plan is compiled if
its prediction is near the limit; if the compiler needs more memory, the search is repeated with a lower limit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace

from penstock._bytes import format_bytes
from penstock.shard.errors import CompileError, PlanError
from penstock.shard.hlo.analysis import Measured
from penstock.shard.mesh.resharding import union
from penstock.shard.mesh.shapes import describe_mesh
from penstock.shard.record import PlanRecord
from penstock.shard.search.cost import largest_live_values, predict_cost
from penstock.shard.search.mesh_search import MeshPlan
from penstock.shard.trace.step import TracedStep

_NEAR = 0.6
"""A plan predicted below this fraction of the limit is compiled only on request. Few predictions are off by more
(`penstock bench shard`)."""
_ABOVE = 1.1
"""A plan predicted above this multiple of the limit is refused without compiling."""
_LARGEST = 6000
"""Steps with more sharding constraints than this are compiled only on request. A step at this size compiles in some seconds."""
_ATTEMPTS = 3
"""The most plans that are compiled."""

Compile = Callable[[PlanRecord], tuple[Measured, str]]


def enforce_limit(
    found: MeshPlan,
    plan: PlanRecord,
    traced: TracedStep,
    compile_plan: Compile,
    search_again: Callable[[float], PlanRecord | None],
    check: bool | None,
) -> PlanRecord:
    """Return a plan that fits its memory limit; raise if none is found.

    Args:
      found: the decisions of the search.
      plan: the same decisions as a record.
      traced: the step.
      compile_plan: returns the compiler's figures for a plan, and what it was compiled for.
      search_again: returns a plan for a limit in bytes; None if there is none.
      check: True always compiles, False never does; None compiles if the prediction is near the limit and the program is small.

    Returns:
      The plan, or another one, with the compiler's figures if it was compiled.

    Raises:
      PlanError: no layout fits the limit, by prediction or once compiled.
      CompileError: the plan does not compile, and `check` is True.
    """
    if found.candidate.memory <= plan.limit:
        return _check_memory(plan, compile_plan, search_again, check)
    fitting = _compile_before_refusing(plan, compile_plan, check)
    if fitting is None:
        raise PlanError(_describe_excess(found, traced, plan.limit))
    return fitting


def _check_memory(
    plan: PlanRecord, compile_plan: Compile, search_again: Callable[[float], PlanRecord | None], check: bool | None
) -> PlanRecord:
    """Return a plan that fits its memory limit when it is compiled.

    If the plan does not fit, the limit of the search is lowered by the error of the prediction, and the search is repeated.
    """
    if not _is_worth_compiling(plan, _NEAR, check):
        return plan
    limit, tried = float(plan.limit), []
    for _ in range(_ATTEMPTS):
        measured, where = _measure_or_warn(plan, compile_plan, check)
        if measured is None:
            return plan
        tried.append(replace(plan, checked=measured))
        if measured.memory <= plan.limit:
            return tried[-1]
        # Slightly below the corrected limit, so that the search does not find the same plan again.
        limit = min(limit, float(plan.cost.memory.total)) * min(0.98, 0.98 * plan.limit / measured.memory)
        other = search_again(limit)
        if other is None:
            break
        plan = other
    smallest = min(tried, key=lambda each: each.checked.memory if each.checked else 0)
    assert smallest.checked is not None
    raise PlanError(
        f"no layout that was found fits {format_bytes(plan.limit)} a device once compiled ({where}): the smallest needs "
        f"{format_bytes(smallest.checked.memory)}, {format_bytes(smallest.checked.memory - plan.limit)} too much, "
        f"of which {format_bytes(smallest.checked.arguments)} are arguments; it was predicted to need "
        f"{format_bytes(smallest.cost.memory.total)}. More devices, a smaller batch, or jax.checkpoint around each layer would "
        "help."
    )


def _compile_before_refusing(plan: PlanRecord, compile_plan: Compile, check: bool | None) -> PlanRecord | None:
    """Return a plan that is predicted to exceed its limit, if the compiler needs less; else None."""
    if plan.cost.memory.total > _ABOVE * plan.limit or not _is_worth_compiling(plan, 0.0, check):
        return None
    measured, _ = _measure_or_warn(plan, compile_plan, check)
    return replace(plan, checked=measured) if measured is not None and measured.memory <= plan.limit else None


def _describe_excess(found: MeshPlan, traced: TracedStep, limit: int) -> str:
    """Describe by how much the smallest plan exceeds the limit, and what takes the most memory in it.

    Args:
      found: the plan of least memory.
      traced: the step.
      limit: bytes that one device may hold.
    """
    prepared, assignment = found.prepared, found.candidate.assignment
    problem, program = prepared.problem, prepared.model.program
    memory = predict_cost(problem, assignment, prepared.roles, prepared.model.inputs, program.unknown).memory
    stored = sorted(
        (
            (size / problem.links.shards(union(assignment[node])), leaf)
            for leaf, (node, size) in zip(traced.inputs, problem.stored, strict=True)
        ),
        key=lambda each: -each[0],
    )
    leaves = [f"{format_bytes(size)} of {leaf.path!r} {leaf.dtype}{list(leaf.shape)}" for size, leaf in stored[:3]]
    activations = [
        f"{format_bytes(size)} of an activation {program.values[number].dtype}{list(program.values[number].shape)}"
        for number, size in largest_live_values(problem, assignment, 3)
    ]
    return (
        f"no layout fits {format_bytes(limit)} a device on mesh {describe_mesh(prepared.mesh_shape)}: the smallest that was "
        f"found needs {format_bytes(memory.total)} by prediction, {format_bytes(memory.total - limit)} too much: "
        f"{format_bytes(memory.arguments)} of arguments and {format_bytes(memory.activations)} of activations. "
        f"The largest on each device: {'; '.join((*leaves, *activations))}. "
        f"More than {math.prod(prepared.mesh_shape.values())} devices, a smaller batch, or jax.checkpoint around each layer "
        "would help."
    )


def _is_worth_compiling(plan: PlanRecord, near: float, check: bool | None) -> bool:
    """Return whether to compile a plan, given the fraction of the limit from which a prediction counts as near."""
    small = len(plan.sharding_constraints.results) <= _LARGEST
    return check is True or (check is None and small and plan.cost.memory.total > near * plan.limit)


def _measure_or_warn(plan: PlanRecord, compile_plan: Compile, check: bool | None) -> tuple[Measured | None, str]:
    """Return the compiler's figures, and what it compiled for; if that fails, raise if `check` is True, else warn."""
    try:
        return compile_plan(plan)
    except CompileError as error:
        if check:
            raise
        warnings.warn(
            f"the plan is near its memory limit, and could not be compiled here to check that it fits: {error}", stacklevel=5
        )
        return None, ""
