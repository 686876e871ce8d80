"""Plan in several processes: process 0 plans, and the others take its plan.

The processes of one training have to run the same program. A plan that each of them made might differ: the speed of CPUs is
measured, and a compiler may fail in one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax

from penstock.shard import Plan, PlanError
from penstock.shard.serialization import from_json, to_json
from penstock.shard.trace.fingerprint import describe_difference
from penstock.shard.trace.step import TracedStep
from penstock.train.together import FirstProcessError, decide

_calls = itertools.count()


def plan_together(make: Callable[[], Plan], traced: TracedStep, devices: Any) -> Plan:
    """Return a plan that is the same in all processes. All of them call this for the same steps in the same order.

    Args:
      make: makes the plan. Only process 0 calls it.
      traced: the step.
      devices: the devices that were given, in order, or None.

    Raises:
      PlanError: in all processes, if process 0 found no plan.
      RuntimeError: in the others, if process 0 raised another error, or if they run another step.
    """
    if jax.process_count() == 1:
        return make()
    made: list[Plan] = []

    def text() -> str:
        made.append(make())
        return to_json(made[0])

    try:
        received = decide(text, f"plan/{next(_calls)}")
    except FirstProcessError as error:
        if error.kind == PlanError.__name__:
            raise PlanError(error.reason) from None
        raise
    if made:
        return made[0]
    record = from_json(received, "the plan of process 0")
    if record.fingerprint != traced.fingerprint():
        difference = describe_difference(record.inputs, record.outputs, traced.inputs, traced.outputs)
        raise RuntimeError(f"process {jax.process_index()} runs another step than process 0: {difference}")
    return Plan._from_record(record, traced, devices)
