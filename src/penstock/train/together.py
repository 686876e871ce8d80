"""Let process 0 decide for all: a function goes in, and its result in process 0 comes out in every process.

*Correctness.* Process 0 writes each message once, in parts, under names that are not used again, and never waits. The others wait
until it is there, and log after a while for whom. If process 0 dies, JAX's coordination service ends the others.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import zlib
from collections.abc import Callable
from typing import Any

import jax

from penstock._jax import process_messages, wait_for_message

_LOGGER = logging.getLogger("penstock.train")
_LOOK = 60.0  # seconds after which a process says that it waits
_PART = 1 << 20  # characters of a part; the service refuses several megabytes
_calls = itertools.count()


class FirstProcessError(RuntimeError):
    """The error raised in the other processes where process 0 has failed. Its message is that of process 0.

    Attributes:
      kind: the name of the class of the error in process 0.
      reason: the message of that error.
    """

    def __init__(self, kind: str, reason: str):
        super().__init__(f"process 0 failed: {kind}: {reason}")
        self.kind, self.reason = kind, reason


def decide(make: Callable[[], Any], name: str | None = None) -> Any:
    """Return what a function returns in process 0, in all processes. Only process 0 calls it.

    All processes call this for the same decisions in the same order; or from several threads, with a name for each decision.

    Args:
      make: makes a value for JSON.
      name: names the decision; None for its number.

    Raises:
      Exception: in process 0, the error of the function.
      FirstProcessError: in the others, if process 0 failed.
    """
    if jax.process_count() == 1:
        return make()
    key, messages = f"penstock/train/{name or next(_calls)}", process_messages()
    if jax.process_index() == 0:
        try:
            value = make()
        except BaseException as error:
            _send(messages, key, {"kind": type(error).__name__, "reason": str(error)})
            raise
        _send(messages, key, {"value": value})
        return value
    message = _receive(messages, key)
    if "kind" in message:
        raise FirstProcessError(message["kind"], message["reason"])
    return message["value"]


def _send(messages: Any, key: str, content: dict[str, Any]) -> None:
    text = base64.b85encode(zlib.compress(json.dumps(content).encode())).decode()
    parts = [text[start : start + _PART] for start in range(0, len(text), _PART)]
    for number, part in enumerate(parts):
        messages.key_value_set(f"{key}/part/{number}", part)
    messages.key_value_set(f"{key}/parts", str(len(parts)))


def _receive(messages: Any, key: str) -> dict[str, Any]:
    count = int(_wait(messages, f"{key}/parts"))
    text = "".join(_wait(messages, f"{key}/part/{number}") for number in range(count))
    return dict(json.loads(zlib.decompress(base64.b85decode(text))))


def _wait(messages: Any, key: str) -> str:
    while (text := wait_for_message(messages, key, _LOOK)) is None:
        _LOGGER.warning("process %d waits for process 0 (%s)", jax.process_index(), key)
    return text
