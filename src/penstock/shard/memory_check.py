"""Plans that are compiled before they are handed out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

from penstock.shard.hlo.analysis import CompileError, Measured
from penstock.shard._planned import Plan
from penstock.shard.units import format_bytes
from penstock.shard.verify import compiled

_NEAR = 0.6
"""Predictions below this part of the limit are not checked unless asked: so far off few are (`penstock bench shard`)."""
_ABOVE = 1.1
"""Up to this many times the limit, what is predicted not to fit is compiled before it is refused."""
_LARGEST = 6000
"""Layouts in a step that is checked without being asked: it is compiled in some seconds."""
_ATTEMPTS = 3


class PlanError(ValueError):
    """No plan can be made: the message says of what, and what would be nearest."""


def checked(plan: Plan, again: Callable[[float], Plan | None], check: bool | None) -> Plan:
    """The plan, or another one, that keeps its memory limit when it is compiled.

    Where it does not, the limit of the search is lowered by as much as the prediction was wrong, and it is searched again.

    Args:
      plan: to begin with.
      again: makes a plan for a limit in bytes, or None if there is none.
      check: False: it is not compiled; None: only where it might matter, does not take long, and can be done here.

    Raises:
      PlanError: none of those that were compiled keeps the limit.
      CompileError: it does not compile, and `check` is True.
    """
    if not _worth_it(plan, _NEAR, check):
        return plan
    limit, tried = float(plan.limit), []
    for _ in range(_ATTEMPTS):
        measured, where = _compiled(plan, check)
        if measured is None:
            return plan
        tried.append(replace(plan, checked=measured))
        if measured.memory <= plan.limit:
            return tried[-1]
        # A little lower still, so that the same plan is not found again.
        limit = min(limit, float(plan.cost.memory.total)) * min(0.98, 0.98 * plan.limit / measured.memory)
        other = again(limit)
        if other is None:
            break
        plan = other
    smallest = min(tried, key=lambda each: each.checked.memory if each.checked else 0)
    assert smallest.checked is not None
    raise PlanError(
        f"no layout that was found fits {format_bytes(plan.limit)} a device once compiled ({where}): the smallest needs "
        f"{format_bytes(smallest.checked.memory)}, {format_bytes(smallest.checked.memory - plan.limit)} too much, "
        f"of which {format_bytes(smallest.checked.arguments)} are arguments; it was predicted to need "
        f"{format_bytes(smallest.cost.memory.total)}. More devices, a smaller batch, or jax.checkpoint around each layer would help."
    )


def fits_after_all(plan: Plan, check: bool | None) -> Plan | None:
    """A plan that is predicted to be above its limit, if the compiler needs less."""
    if plan.cost.memory.total > _ABOVE * plan.limit or not _worth_it(plan, 0.0, check):
        return None
    measured, _ = _compiled(plan, check)
    return replace(plan, checked=measured) if measured is not None and measured.memory <= plan.limit else None


def _worth_it(plan: Plan, near: float, check: bool | None) -> bool:
    small = len(plan.sharding_constraints.results) <= _LARGEST
    return check is True or (check is None and small and plan.cost.memory.total > near * plan.limit)


def _compiled(plan: Plan, check: bool | None) -> tuple[Measured | None, str]:
    """What the compiler says, and for what it compiled; None if it cannot, and nobody asked."""
    try:
        return compiled(plan)
    except CompileError as error:
        if check:
            raise
        warnings.warn(
            f"the plan is near its memory limit, and could not be compiled here to check that it is kept: {error}", stacklevel=4
        )
        return None, ""
