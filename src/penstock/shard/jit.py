"""Jit a step so that it follows a plan.

In: a plan record, a step and a mesh. Out: the result of `jax.jit`, with the plan's shardings of arguments and results, and its
sharding constraints inside of the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax

from penstock.shard.apply.sharding_constraints import insert_constraints
from penstock.shard.record import PlanRecord, named_shardings
from penstock.shard.trace.fingerprint import describe_difference
from penstock.shard.trace.step import TracedStep, trace

_LOGGER = logging.getLogger("penstock.shard")


def jit_step(plan: PlanRecord, traced: TracedStep | None, step: Callable, mesh: Any, **settings: Any) -> Any:
    """Return `jax.jit` of a step that follows a plan.

    Args:
      plan: the layouts.
      traced: the step that the plan was made for. None for a plan from a file, which lacks the structure of the arguments:
        they are then constrained inside of the jitted function.
      step: the step, which is traced again at each call with new shapes.
      mesh: a mesh of devices.
      **settings: settings of `jax.jit`.

    Raises:
      ValueError: a call or `lower` of the result raises it, if the step or its arguments are not those of the plan.
    """

    def planned(*args: Any) -> Any:
        called = trace(step, args, [leaf.weak for leaf in plan.inputs])
        check_step(plan, called)
        flat = jax.tree_util.tree_leaves(args)
        if traced is None:
            flat = list(map(jax.lax.with_sharding_constraint, flat, named_shardings(plan.inputs, mesh)))
        results = insert_constraints(called.closed, plan.sharding_constraints, mesh)(*flat)
        if traced is None:
            results = list(map(jax.lax.with_sharding_constraint, results, named_shardings(plan.outputs, mesh)))
        return jax.tree_util.tree_unflatten(called.out_tree, results)

    planned.__name__ = planned.__qualname__ = getattr(step, "__name__", "step")
    settings.setdefault("keep_unused", True)  # otherwise jit drops unused arguments, which the plan counts
    if traced is not None:
        settings["in_shardings"] = jax.tree_util.tree_unflatten(traced.tree, named_shardings(plan.inputs, mesh))
        settings["out_shardings"] = jax.tree_util.tree_unflatten(traced.out_tree, named_shardings(plan.outputs, mesh))
    return jax.jit(planned, **settings)


def check_step(plan: PlanRecord, traced: TracedStep) -> None:
    """Check that a plan was made for this step and these arguments.

    A step that differs only in numbers written in it, such as a learning rate, is accepted. This is logged by the logger
    "penstock.shard", at the level INFO.

    Args:
      plan: the plan.
      traced: the step.

    Raises:
      ValueError: the step or its arguments are not those of the plan; the message says what differs.
    """
    if traced.fingerprint() != plan.fingerprint:
        difference = describe_difference(plan.inputs, plan.outputs, traced.inputs, traced.outputs)
        raise ValueError(f"the plan is for another step: {difference}")
    if traced.numbers() != plan.numbers:
        _LOGGER.info(
            "the plan was made for a step with other numbers written in it, such as another learning rate; it fits this step too"
        )


def jit_flat(plan: PlanRecord, traced: TracedStep, mesh: Any) -> Any:
    """Return the step as a jitted function of its flat arguments, with the state donated, to be compiled and not run.

    It leaves out `jax.debug.print` and `jax.debug.callback`, because a program that calls back cannot be exported.

    Args:
      plan: the layouts.
      traced: the step.
      mesh: a `Mesh` or an `AbstractMesh`.
    """
    return jax.jit(
        insert_constraints(traced.closed, plan.sharding_constraints, mesh, debug=False),
        in_shardings=named_shardings(plan.inputs, mesh),
        out_shardings=named_shardings(plan.outputs, mesh),
        donate_argnums=tuple(sorted(set(plan.state.values()))),
        keep_unused=True,
    )


def abstract_arguments(plan: PlanRecord, traced: TracedStep, mesh: Any) -> list[jax.ShapeDtypeStruct]:
    """Return the flat arguments of the step, with their shardings on a mesh.

    Args:
      plan: the layouts.
      traced: the step.
      mesh: a `Mesh` or an `AbstractMesh`.
    """
    return [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for leaf, sharding in zip(traced.inputs, named_shardings(plan.inputs, mesh), strict=True)
    ]
