"""Deferred handling of Ctrl-C: it takes effect only at points that the training loop chooses."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ctrl_c_at_checks() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C inside of the `with` until the returned function is called, which then raises KeyboardInterrupt.

    At other places, it may do harm. jaxlib 0.10 can crash at interpreter exit after a KeyboardInterrupt inside of a compilation,
    and a KeyboardInterrupt inside of JAX's garbage collection callback is lost. A second Ctrl-C ends the process at once.

    Nothing changes on other threads than the main thread, which alone receives signals, or if another handler of Ctrl-C is set.
    """
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def check() -> None:
        if interrupted:
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
