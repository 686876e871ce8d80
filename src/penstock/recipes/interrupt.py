"""Ctrl-C at a place that bears it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ctrl_c_at_checks() -> Iterator[Callable[[], None]]:
    """Within the `with`, Ctrl-C only takes effect where the function that this gives is called, as a KeyboardInterrupt.

    Elsewhere it may do harm: jaxlib 0.10 can crash at the interpreter's end after a KeyboardInterrupt inside of a
    compilation, and one inside of JAX's garbage collection callback is lost. A second Ctrl-C ends the process at once.

    Off the main thread, which alone gets signals, and where Ctrl-C is ignored or somebody else's, all stays as it is.
    """
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    on_main = threading.current_thread() is threading.main_thread()
    if not on_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
