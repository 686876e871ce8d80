"""Turn signals into bytes that a loop reads, so that all is decided in one place and none of it inside of a handler."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

_CAUGHT = (signal.SIGINT, signal.SIGTERM)


class SignalPipe:
    """The signals that came since they were last read.

    Attributes:
      descriptor: readable if some came. A process that ended is one (SIGCHLD).
    """

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def read(self) -> list[int]:
        """Return the numbers of the signals that came, without waiting."""
        try:
            return list(os.read(self.descriptor, 4096))
        except BlockingIOError:
            return []


@contextlib.contextmanager
def signal_pipe() -> Iterator[SignalPipe]:
    """Note Ctrl-C, SIGTERM and the ends of processes inside of the `with`. To be entered on the main thread.

    A signal that is ignored stays so: a shell starts its background commands without Ctrl-C.
    """
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    before = {
        number: signal.signal(number, lambda *_: None)
        for number in (*_CAUGHT, signal.SIGCHLD)
        if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN
    }
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield SignalPipe(reading)
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)
