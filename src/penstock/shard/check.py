"""Plans that are compiled before they are handed out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.shard.planned import Plan
from penstock.shard.text import size_of
from penstock.shard.verify import compiled

_NEAR = 0.6
"""Predictions below this part of the limit are not checked unless asked: so far off none was (`penstock bench shard`)."""
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
      check: False: it is not compiled; None: only where it might matter, and does not take long.

    Raises:
      PlanError: none of those that were compiled keeps the limit.
      CompileError: it does not compile.
    """
    near = plan.cost.memory.total > _NEAR * plan.limit
    small = len(plan.steering.results) <= _LARGEST
    if check is False or (check is None and not (near and small)):
        return plan
    limit, tried = float(plan.limit), []
    for _ in range(_ATTEMPTS):
        measured, where = compiled(plan)
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
        f"no layout that was found fits {size_of(plan.limit)} a device once compiled ({where}): the smallest needs "
        f"{size_of(smallest.checked.memory)}, {size_of(smallest.checked.memory - plan.limit)} too much, "
        f"of which {size_of(smallest.checked.arguments)} are arguments; it was predicted to need "
        f"{size_of(smallest.cost.memory.total)}. More devices, a smaller batch, or jax.checkpoint around each layer would help."
    )
