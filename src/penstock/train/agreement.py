"""Let the processes of a run agree: on a result of process 0 (`decide`), and on the step at which all stop (`Agreement`).

Messages go through JAX's coordination service, and not through collectives. So any thread may send them, while the devices work.

*Correctness of `decide`.* Process 0 writes each message once, in parts, under names that are not used again, and never waits. The
others wait until it is there, and log after a while for whom. If process 0 dies, JAX's coordination service ends the others.

*Correctness of `Agreement`.* A *tick* is a step or a batch of an evaluation. All processes do the same ticks in the same order. A
process must not stop alone: the others would wait for it inside of a collective. Before each tick, the loop asks the `Agreement`
whether it has to stop. Once a stop is requested, each process holds: its loop waits before its next tick, while the thread of the
`Agreement` sends the number of ticks that the loop has started. That number is final, since it is read under the lock without
which no tick starts. With the numbers of all processes, each one goes on until it has started as many ticks as the largest of
them. No thread waits for a loop: a loop may be blocked inside of a tick, for which others have yet to start theirs, but the
threads answer all the same. So all numbers arrive, and all loops reach the same tick.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import logging
import threading
import zlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax

from penstock._jax import process_messages, wait_for_message
from penstock._stopping import Stopping
from penstock.errors import FirstProcessError

_LOGGER = logging.getLogger("penstock.train")
_LOOK = 60.0  # seconds after which a process logs that it waits
_PART = 1 << 20  # characters of a part; the service refuses several megabytes
_REQUEST = 30.0  # seconds of one request to the coordination service
_END = 3.0  # seconds that process 0, which has the coordination service, waits for the others
_ENDED = "ended"
_calls, _loops = itertools.count(), itertools.count()


def decide(make: Callable[[], Any], name: str | None = None) -> Any:
    """Call a function in process 0, and return its result in all processes.

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


class Agreement:
    """The step at which a loop stops in all processes. Use it in a `with`. All processes make theirs in the same order.

    Args:
      stopping: the stop requests of this process. It gets the requests of other processes too.
    """

    def __init__(self, stopping: Stopping):
        self._stopping = stopping
        self._count = jax.process_count()
        self._lock = threading.Lock()
        self._ticks = 0
        self._holds = False
        self._last: int | None = None  # the tick at which all stop
        self._agreed = threading.Event()
        self._key = f"penstock/stop/{next(_loops)}"

    def __enter__(self) -> Agreement:
        if self._count > 1:
            self._messages, self._index = process_messages(), jax.process_index()
            self._telling = self._stopping.telling(self._tell_all)
            self._telling.__enter__()
            self._stopping.before_end = self._end_process_0_last
            threading.Thread(target=self._listen, name="penstock-agreement", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._count > 1:
            self._telling.__exit__(None, None, None)
            self._stopping.before_end = lambda: None
            with contextlib.suppress(Exception):  # the service may be gone, if another process has died
                self._send(f"to/{self._index}", _ENDED)

    def must_stop(self) -> bool:
        """Return whether the loop has to stop here. Otherwise it starts one tick."""
        if self._count == 1:
            return self._stopping.requested is not None
        with self._lock:
            if not self._holds:
                self._ticks += 1
                return False
        self._agreed.wait()
        assert self._last is not None
        if self._ticks >= self._last:
            return True
        self._ticks += 1
        return False

    def _tell_all(self) -> None:
        for process in range(self._count):
            self._send(f"to/{process}", f"{self._stopping.requested} in process {self._index}")

    def _listen(self) -> None:
        """Wait for a request, and agree with the other processes. It runs on the thread of this object."""
        with contextlib.suppress(Exception):  # the service ends with the program
            request = self._receive(f"to/{self._index}")
            if request == _ENDED:
                return
            with self._lock:
                self._holds = True
                started = self._ticks
            self._send(f"ticks/{self._index}", str(started))
            self._last = max(int(self._receive(f"ticks/{process}")) for process in range(self._count))
            self._agreed.set()
            if self._stopping.requested is None:
                self._stopping.request(request)
                self._stopping.enforce_grace_period()

    def _end_process_0_last(self) -> None:
        """Let process 0 end last: the others would end with an error if its coordination service was gone."""
        if self._index:
            self._send(f"end/{self._index}", "")
        else:
            for process in range(1, self._count):
                wait_for_message(self._messages, f"{self._key}/end/{process}", _END)

    def _send(self, name: str, text: str) -> None:
        self._messages.key_value_set(f"{self._key}/{name}", text, allow_overwrite=True)

    def _receive(self, name: str) -> str:
        while (text := wait_for_message(self._messages, f"{self._key}/{name}", _REQUEST)) is None:
            pass
        return text
