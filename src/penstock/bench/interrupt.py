"""How a benchmark ends before it is done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """What ends a process from outside, a closed terminal or a time limit, ends the workers too and keeps what was measured."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    kinds = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    here = threading.current_thread() is threading.main_thread()
    before = {kind: signal.signal(kind, interrupt) for kind in kinds if here}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
