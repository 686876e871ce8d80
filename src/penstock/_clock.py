"""Add up seconds by name, and show the same spans in a `jax.profiler` trace."""

from __future__ import annotations

import time
from types import TracebackType

import jax


class Clock(dict[str, float]):
    """The seconds spent under each name. One thread at a time may write to it; others may read it at any time."""

    def time(self, name: str) -> _Span:
        """Return a context manager that adds the time inside of it, and shows it as `penstock.<name>` in a trace."""
        return _Span(self, name)

    def add(self, other: dict[str, float]) -> None:
        """Add the seconds of another clock."""
        for name, seconds in other.items():
            self[name] = self.get(name, 0.0) + seconds


_is_tracing = jax.profiler.TraceAnnotation.is_enabled


class _Span:
    __slots__ = ("_clock", "_name", "_start", "_trace")

    def __init__(self, clock: Clock, name: str):
        self._clock, self._name = clock, name
        self._trace: jax.profiler.TraceAnnotation | None = None

    def __enter__(self) -> None:
        if _is_tracing():
            self._trace = jax.profiler.TraceAnnotation("penstock." + self._name)
            self._trace.__enter__()
        self._start = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        clock, name = self._clock, self._name
        clock[name] = clock.get(name, 0.0) + time.perf_counter() - self._start
        if self._trace is not None:
            self._trace.__exit__(kind, error, traceback)
