"""Plan in several processes: process 0 plans, and the others take its plan.

The processes of one training have to run the same program. A plan that each of them made might differ: the speed of CPUs is
measured, and a compiler may fail in one of them.

*Correctness.* Every process calls `plan_together` for the same steps in the same order, as each runs the same program on the same
data, so the number of the call names the plan. Process 0 writes each text once, under a name that no later call uses, and never
waits. The others wait until it is there, and say after a while for whom. If process 0 dies, JAX's coordination service ends the
others.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import time
import zlib
from collections.abc import Callable
from typing import Any

import jax

from penstock._jax import process_messages, wait_for_message
from penstock.shard import Plan, PlanError
from penstock.shard.serialization import from_json, to_json
from penstock.shard.trace.fingerprint import describe_difference
from penstock.shard.trace.step import TracedStep

_LOGGER = logging.getLogger("penstock.keras")
_CHUNK = 1 << 20  # characters of one message; the service refuses those of several megabytes
_LOOK = 30.0  # seconds after which a process says that it waits
_calls = itertools.count()


def plan_together(make: Callable[[], Plan], traced: TracedStep, devices: Any) -> Plan:
    """Return a plan that is the same in all processes.

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
    name, messages = f"penstock/plan/{next(_calls)}", process_messages()
    if jax.process_index() == 0:
        try:
            plan = make()
        except Exception as error:
            _send(messages, name, {"refused": isinstance(error, PlanError), "error": f"{type(error).__name__}: {error}"})
            raise
        _send(messages, name, {"plan": to_json(plan)})
        return plan
    received = _receive(messages, name)
    if "plan" in received:
        record = from_json(received["plan"], "the plan of process 0")
        if record.fingerprint != traced.fingerprint():
            difference = describe_difference(record.inputs, record.outputs, traced.inputs, traced.outputs)
            raise RuntimeError(f"process {jax.process_index()} runs another step than process 0: {difference}")
        return Plan._from_record(record, traced, devices)
    if received["refused"]:
        raise PlanError(received["error"].partition(": ")[2])
    raise RuntimeError(f"process 0 could not plan: {received['error']}")


def _send(messages: Any, name: str, content: dict[str, Any]) -> None:
    text = base64.b85encode(zlib.compress(json.dumps(content).encode())).decode()
    chunks = [text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK)]
    for number, chunk in enumerate(chunks):
        messages.key_value_set(f"{name}/{number}", chunk)
    messages.key_value_set(name, str(len(chunks)))


def _receive(messages: Any, name: str) -> dict[str, Any]:
    count = int(_wait(messages, name))
    text = "".join(_wait(messages, f"{name}/{number}") for number in range(count))
    return dict(json.loads(zlib.decompress(base64.b85decode(text))))


def _wait(messages: Any, key: str) -> str:
    begin = time.monotonic()
    while (text := wait_for_message(messages, key, _LOOK)) is None:
        waited = time.monotonic() - begin
        _LOGGER.warning("process %d has waited for the plan of process 0 for %.0f s", jax.process_index(), waited)
    return text
