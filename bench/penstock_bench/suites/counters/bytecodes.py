"""Count the bytecodes that Python executes, on all threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

_TOOL = 4  # of sys.monitoring's six; 0 to 3 and 5 are for debuggers, coverage, profilers and optimizers


def count_bytecodes(work: Callable[[], object]) -> int:
    """Run `work`, and return the number of bytecodes that all threads executed meanwhile.

    Threads that run already are counted from Python 3.12 on; before, only those that start within `work`.
    """
    return _by_monitoring(work) if hasattr(sys, "monitoring") else _by_tracing(work)


def _by_monitoring(work: Callable[[], object]) -> int:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]  # from Python 3.12 on
    executed = [0]

    def instruction(code: CodeType, offset: int) -> None:
        executed[0] += 1  # the interpreter lock is held, and no callback is called within a callback

    monitoring.use_tool_id(_TOOL, "penstock counters")
    monitoring.register_callback(_TOOL, monitoring.events.INSTRUCTION, instruction)
    monitoring.set_events(_TOOL, monitoring.events.INSTRUCTION)
    try:
        work()
    finally:
        monitoring.set_events(_TOOL, 0)
        monitoring.register_callback(_TOOL, monitoring.events.INSTRUCTION, None)
        monitoring.free_tool_id(_TOOL)
    return executed[0]


def _by_tracing(work: Callable[[], object]) -> int:
    executed = [0]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            executed[0] += 1
        return trace

    before, of_threads = sys.gettrace(), threading.gettrace()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        threading.settrace(of_threads)
    return executed[0]
