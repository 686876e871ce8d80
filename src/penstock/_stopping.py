"""Stop a run by SIGTERM or SIGINT: the training loop learns at its next step that it has to end.

*Correctness.* Python runs a signal's handler on the main thread, between two of its instructions. While the main thread compiles,
it executes none for minutes. So the interpreter is told to write a byte to a socket when a signal comes (`signal.set_wakeup_fd`,
which happens inside of the C handler), and a thread of this module reads it. That thread reads to the end of the `with`, and sets
`requested`, which the loop reads before each step and each batch of an evaluation. A second thread then enforces the grace
period:

1. If no loop runs, it ends the process. If one runs that has no steps to save, since it has done none since it began, the thread
   waits a moment for the loop to end by itself. Then it ends the process: the main thread may be compiling.
2. Otherwise it waits until the loop has saved and ended, at most for the grace period. Then it ends the process: the checkpoint
   that is being written is left unfinished, and the one before is the latest.

A second SIGINT ends the process at once. The reader tells it from the first one, and not the handler, which Python may call for
the first one only after the second. The end of the `with` puts back the handlers, and ends the threads; nothing else waits for
them. After a stop, a further SIGTERM means the same stop, and is ignored for the rest of the grace period. This module imports no
other of this package, so that it can listen while they are imported.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

GRACE = "PENSTOCK_GRACE"
DEFAULT_GRACE = 30.0

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_MOMENT = 2.0  # seconds that a loop without steps to save gets to end by itself
_RESERVE = 0.1  # part of the grace period that is left when the process ends by itself
_LOOK = 0.05  # seconds between two looks at whether there are still steps to save
_SAME_KEY = 0.5  # seconds within which a second SIGINT is the same key press, sent to a group of processes by two ways


class Stopped(SystemExit):
    """Raised when a run was ended by a signal, after it has been saved. It ends the process with status 0.

    Attributes:
      step: the step of the checkpoint from which the run continues; None if there is none yet.
    """

    def __init__(self, step: int | None):
        super().__init__(0)
        self.step = step


class Stopping:
    """Listens to signals, in a `with`. On other threads than the main one, which alone receives signals, it does nothing.

    Args:
      grace: seconds from the signal to the moment when the process is killed.

    Attributes:
      requested: the name of the signal that came; None if there was none.
      loops: number of loops that run.
      has_steps_to_save: whether a loop has done a step since it began.
      answered: whether a loop has ended for the request. The program may then end as it likes, within the grace period.
      last_line: returns what is printed if the thread ends the process.
      before_end: is called before the thread ends the process.
      command: continues the run; None for the command line of this process.
    """

    current: Stopping | None = None

    def __init__(self, grace: float):
        self.grace = grace
        self.requested: str | None = None
        self.loops = 0
        self.has_steps_to_save = self.answered = False
        self.last_line: Callable[[], str] = lambda: f"nothing was done yet; {self.how_to_continue()}"
        self.before_end: Callable[[], None] = lambda: None
        self.command: str | None = None
        self._at = 0.0
        self._listeners: list[Callable[[], None]] = []
        self._ended = threading.Event()
        self._installed = self._again = False

    def __enter__(self) -> Stopping:
        """Begin to listen. Inside of the `with` of another such object, return that one."""
        if Stopping.current is not None:
            Stopping.current.grace = self.grace
            return Stopping.current
        if threading.current_thread() is threading.main_thread():
            self._install()
        else:
            import logging  # not at the top: signals are listened to before anything else is imported

            logging.getLogger("penstock.train").warning(
                "this thread is not the main one, which alone gets signals: SIGTERM and Ctrl-C will not save this run"
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._ended.set()
        if not self._installed:
            return
        Stopping.current = None
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if isinstance(error, Stopped) and self._handlers.get(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle_late)
            _ignore_at_the_end()
        self._writer.close()  # the thread reads the end of the stream
        self._installed = False

    @classmethod
    @contextlib.contextmanager
    def without_signals(cls, command: str) -> Iterator[Stopping]:
        """Let loops inside of the `with` obey a new object, which only `request` stops: where others get the signals.

        Args:
          command: says how the run continues.
        """
        before, cls.current = cls.current, cls(DEFAULT_GRACE)
        cls.current.command = command
        try:
            yield cls.current
        finally:
            cls.current._ended.set()
            cls.current = before

    @contextlib.contextmanager
    def telling(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call a function when a stop is requested, on another thread than this one, inside of the `with`."""
        self._listeners.append(listener)
        try:
            if self.requested:
                listener()
            yield
        finally:
            self._listeners.remove(listener)

    def request(self, name: str) -> None:
        """Request a stop, as by a signal of this name. Only the first call has an effect."""
        if self.requested is None:
            self._at = time.monotonic()
            self.requested = name
            for listener in list(self._listeners):
                listener()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the `with`, and return whether it has come."""
        return self._ended.wait(seconds)

    def how_to_continue(self) -> str:
        """Say with which command the run continues."""
        command, arguments = self.command, sys.orig_argv
        if command is None and len(arguments) > 1 and arguments[1] == "-c":
            return "to continue, run the same program again"
        return f"to continue: {command or shlex.join([os.path.basename(arguments[0]), *arguments[1:]])}"

    def _install(self) -> None:
        self._installed = True
        Stopping.current = self
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        # A background process of a shell ignores Ctrl-C, and goes on to do so.
        heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, self._handle) for number in heard}
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="penstock-signals", daemon=True).start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Let the process die of a second SIGINT, as a shell expects. The first one needs nothing but its byte in the stream."""
        if number == signal.SIGINT and self._again:
            _die_of(number)

    def _handle_late(self, number: int, frame: FrameType | None) -> None:
        """Let a SIGTERM pass that comes again after the stop that it asked for."""
        if time.monotonic() - self._at > self.grace:
            _die_of(number)

    def _listen(self) -> None:
        """Read the signals. It runs on the thread of this object."""
        names = {int(number): number.name for number in _SIGNALS}
        with self._reader:
            while received := self._reader.recv(1):
                name = names.get(received[0])
                if name and self.requested is None:
                    self.request(name)
                    threading.Thread(target=self.enforce_grace_period, name="penstock-signals", daemon=True).start()
                elif name == self.requested == "SIGINT" and time.monotonic() - self._at > _SAME_KEY:
                    self._end_at_once()

    def _end_at_once(self) -> None:
        """End the process after a second SIGINT: by that signal, or, if the main thread is busy for long, by this thread."""
        self._again = True
        for _ in range(5):  # one that comes right before a call of the system does not interrupt it
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        end_process(f"SIGINT again: {self.last_line()}", 128 + signal.SIGINT)

    def enforce_grace_period(self) -> None:
        """Wait until the loop has ended, and end the process if it has not within the grace period."""
        deadline = self._at + (1 - _RESERVE) * self.grace
        if self.loops:
            self._ended.wait(min(_MOMENT, self.grace / 2))
        while not self._ended.is_set() and (self.has_steps_to_save or self.answered) and time.monotonic() < deadline:
            self._ended.wait(_LOOK)
        if not self._ended.is_set():
            with contextlib.suppress(Exception):
                self.before_end()
            end_process(f"{self.requested}: {self.last_line()}")


def listen_from_the_start() -> None:
    """Wait for signals from now to the end of the process, if this is `penstock train` or PENSTOCK_GRACE is set.

    That variable has the seconds of the grace period. Other programs listen once they call `fit` with a run folder.
    """
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    command = program in ("penstock", "penstock.exe") or (program == "-m" and "penstock" in sys.orig_argv)
    train = command and sys.argv[1:2] == ["train"]
    grace = os.environ.get(GRACE)
    if train or grace:
        try:
            seconds = float(grace or DEFAULT_GRACE)
            if not 0 <= seconds < math.inf:
                raise ValueError
        except ValueError:
            print(f"penstock: {GRACE}={grace}: needs seconds >= 0", file=sys.stderr)
            return
        Stopping(seconds).__enter__()
        _ignore_at_the_end()


def _ignore_at_the_end() -> None:
    """Let SIGTERM be ignored while the interpreter ends, which puts back default handlers, but leaves an ignored signal alone."""
    atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)


def _die_of(number: int) -> None:
    """End the process by a signal. Only the main thread can call this."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def end_process(line: str, status: int = 0) -> None:
    """Print a line, and end the process, without waiting for any thread."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        os.write(2, f"penstock: {line}\n".encode())
    os._exit(status)
