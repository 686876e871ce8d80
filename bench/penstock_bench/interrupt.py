"""Handle signals that end a benchmark as Ctrl-C does: its workers end too, and the measurements so far are kept."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Turn SIGHUP (a closed terminal) and SIGTERM (such as a batch system's time limit) into `KeyboardInterrupt`."""

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
