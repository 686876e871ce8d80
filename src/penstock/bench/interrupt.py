"""End a benchmark from outside as Ctrl-C does: its workers end too, and what was measured is kept."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Turn the signals of a closed terminal and of a time limit (SIGHUP, SIGTERM) into `KeyboardInterrupt`."""

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
