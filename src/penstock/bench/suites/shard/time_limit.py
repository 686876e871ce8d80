"""Put an end to a computation that may take for ever, within a process that has more to do."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` once the block has taken longer, on the main thread; a system without alarms has no limit."""

    def ring(number: int, frame: object) -> None:
        raise TimeoutError(f"took more than {seconds:g} s")

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
