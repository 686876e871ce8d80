"""Run the ranks once: start them, relay what they write, and end them together.

One thread does all of it, in one loop, and owns all of the state. The loop waits in one place, `select`. That ends when a rank
has written something, when the reader of the output takes more, when a signal came, such as SIGCHLD, or after half a second.
Nothing else in the loop waits: it reads what is there, writes as much as fits, and `poll` does not wait for a process. So no
rank, and no reader of the output, can keep the launcher from ending the others. Signals become bytes that the loop reads, and no
handler decides anything.

The order of an end: the first rank that fails decides the exit code. The others get SIGTERM, and after the grace period the
whole group gets SIGKILL. Ctrl-C and SIGTERM of the launcher are forwarded to the ranks, which may take as long as they want to
save and exit. From then on a failure of a rank sends no second signal, and only begins the grace period. After the last rank,
the processes that ranks have started and left behind get SIGTERM, and SIGKILL after the grace period.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock import _heartbeat
from penstock._heartbeat import COORDINATOR, COUNT, INDEX
from penstock.train.launch.stall import Progress

_LOOK = 0.5  # seconds between two looks at the ranks, if nothing else happens
_STALLED = 124  # the exit code after a stall, the same as the command `timeout` has
_READER_LEFT = 128 + signal.SIGPIPE
_FORWARDED = (signal.SIGINT, signal.SIGTERM)
_OURS = (COORDINATOR, COUNT, INDEX, _heartbeat.FILE, _heartbeat.LAUNCHER)
_OTHERS = ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_LOCAL_DEVICE_IDS")


@dataclass(frozen=True)
class Launch:
    """A command line of `penstock launch`."""

    command: list[str]  # of every rank
    count: int  # of ranks
    devices: int | None  # of each rank; None for one GPU, or JAX's default on CPUs
    restarts: int  # how often all are started again after a failure
    stall: float | None  # seconds without a step after which a run has failed; None for no limit
    grace: float  # seconds between SIGTERM and SIGKILL
    verbose: bool  # whether lines are shown that say only that the ranks are connected


@dataclass(frozen=True)
class Ending:
    """The end of an attempt."""

    code: int  # the exit code
    why: str  # the first failure, in words; "" if there was none
    signalled: bool  # whether a signal of the launcher was forwarded


def run_attempt(launch: Launch, port: int, output: Output, signals: SignalPipe) -> Ending:
    """Start all ranks with a coordinator at a free port, and return when all have ended and their output is written."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-launch-") as folder,
        contextlib.closing(GuardedGroup(launch.grace)) as group,
    ):
        attempt = _Attempt(launch, group, output, signals)
        if launch.stall is not None:
            attempt.progress = Progress(Path(folder), launch.count, launch.stall, time.monotonic())
        attempt.start(port)
        return attempt.run()


class _Attempt:
    def __init__(self, launch: Launch, group: GuardedGroup, output: Output, signals: SignalPipe):
        self.progress: Progress | None = None
        self._launch, self._group, self._output, self._signals = launch, group, output, signals
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._streams: dict[int, tuple[int, LinePrefixer]] = {}  # from a pipe to where its lines go
        self._failure: tuple[int, str] | None = None
        self._forwarded = 0  # signals
        self._kill_at = float("inf")  # when the grace period ends
        self._killed = False
        self._held = False  # whether ranks may have waited for the reader of the output since the last look

    def start(self, port: int) -> None:
        for rank in range(self._launch.count):
            process = self._group.start(self._launch.command, self._environment(rank, port))
            self._running[rank] = process
            for pipe, descriptor in ((process.stdout, 1), (process.stderr, 2)):
                assert pipe is not None
                self._streams[os.dup(pipe.fileno())] = (descriptor, LinePrefixer(rank, self._launch.verbose))
                pipe.close()

    def run(self) -> Ending:
        while self._running or self._streams or self._output.descriptor is not None:
            self._wait()
            now = time.monotonic()
            self._poll_ranks(now)
            self._watch_progress(now)
            self._enforce_grace_period(now)
        code, why = self._failure or (0, "")
        return Ending(code, why, self._forwarded > 0)

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if name not in (*_OURS, *_OTHERS)}
        environment |= {
            COORDINATOR: f"127.0.0.1:{port}",
            COUNT: str(self._launch.count),
            INDEX: str(rank),
            _heartbeat.LAUNCHER: str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
        }
        each = self._launch.devices or 1
        environment["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(rank * each, (rank + 1) * each)))  # of GPUs
        if self._launch.devices is not None:
            environment["JAX_NUM_CPU_DEVICES"] = str(self._launch.devices)
        return environment | (self.progress.environment(rank) if self.progress else {})

    def _wait(self) -> None:
        """Wait until there is a signal, output of a rank, or room for output, and handle it."""
        self._held |= self._output.full
        pipes = [] if self._output.full else list(self._streams)
        writing = [] if self._output.descriptor is None else [self._output.descriptor]
        readable, writable, _ = select.select([self._signals.descriptor, *pipes], writing, [], _LOOK)
        if self._signals.descriptor in readable:
            for number in self._signals.read():
                if number in _FORWARDED:
                    self._forward(signal.Signals(number))
        for pipe in pipes:
            if pipe in readable:
                self._read(pipe)
        if writable:
            try:
                self._output.write()
            except OSError:
                self._fail(_READER_LEFT, "nobody reads the output any more")

    def _read(self, pipe: int) -> None:
        descriptor, lines = self._streams[pipe]
        data = os.read(pipe, 65_536)
        if data:
            self._output.put(descriptor, lines.add(data, time.monotonic()))
        else:
            self._output.put(descriptor, lines.end())
            self._close(pipe)

    def _close(self, pipe: int) -> None:
        del self._streams[pipe]
        os.close(pipe)

    def _forward(self, number: signal.Signals) -> None:
        """Pass a signal on. The second one begins the grace period, and the third one ends it."""
        self._forwarded += 1
        for process in self._running.values():
            process.send_signal(number)
        if self._forwarded == 1:
            self._output.say(
                f"{number.name} goes to all; a second one begins {self._launch.grace:g} s to end, a third one ends them now"
            )
        else:
            self._kill_at = min(self._kill_at, time.monotonic() + (self._launch.grace if self._forwarded == 2 else 0))

    def _poll_ranks(self, now: float) -> None:
        for rank, process in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[rank]
            if code > 0:
                self._fail(code, f"rank {rank} exited with {code}")
            elif code < 0:
                self._fail(128 - code, f"rank {rank} was ended by {_name(-code)}")
            if not self._running and self._streams:  # something that a rank has started writes to them
                self._group.terminate()
                self._kill_at = min(self._kill_at, now + self._launch.grace)

    def _fail(self, code: int, why: str) -> None:
        """Note the first failure, and end the other ranks."""
        if self._failure is not None:
            return
        self._failure = (code, why)
        self._kill_at = min(self._kill_at, time.monotonic() + self._launch.grace)
        if not self._running:
            self._output.say(why)
        elif self._forwarded:
            self._output.say(f"{why}; all get SIGKILL in {self._launch.grace:g} s")
        else:
            self._output.say(f"{why}; all get SIGTERM, and SIGKILL in {self._launch.grace:g} s")
            for process in self._running.values():
                process.terminate()

    def _watch_progress(self, now: float) -> None:
        if self.progress is None or self._failure or self._forwarded or not self._running:
            return
        held, self._held = self._held, False
        if self.progress.stalled(self._running, now, excused=held):
            running = {rank: process.pid for rank, process in self._running.items()}
            self._output.say(self.progress.report(running, now))
            self._fail(_STALLED, f"rank {', '.join(map(str, self.progress.behind(self._running)))} stalled")

    def _enforce_grace_period(self, now: float) -> None:
        """Kill the group at the end of the grace period, and do not wait for output of processes that have left it."""
        if not self._killed and now >= self._kill_at:
            self._killed = True
            self._kill_at = now + 1
            self._group.kill()
        elif self._killed and not self._running and now >= self._kill_at:
            for pipe in list(self._streams):
                self._output.put(self._streams[pipe][0], self._streams[pipe][1].end())
                self._close(pipe)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# The output.
_AT_ONCE = 4096  # bytes that a pipe takes if `select` says that it is ready (PIPE_BUF on Linux)
_FULL = 4 << 20  # waiting bytes after which the launcher stops reading from its processes


class Output:
    """The queue of the lines for stdout and stderr, which it writes without waiting. One thread uses it.

    There is one queue for both, and a block is written to its end before the next one begins. So lines are not mixed even if both
    lead to the same terminal or file. The launcher asks `select` whether the first block's descriptor takes more, and writes at
    most as much as a pipe then takes at once. So a reader that has stopped cannot keep the launcher from forwarding a signal.
    """

    def __init__(self) -> None:
        self._blocks: deque[tuple[int, memoryview]] = deque()
        self._waiting = 0
        self._broken: set[int] = set()  # descriptors that nobody reads any more

    @property
    def descriptor(self) -> int | None:
        """Return the descriptor for which the first block waits; None if there is none."""
        return self._blocks[0][0] if self._blocks else None

    @property
    def full(self) -> bool:
        """Return whether no more should be read, so that the processes wait for the reader of their output."""
        return self._waiting > _FULL

    def put(self, descriptor: int, lines: bytes) -> None:
        """Add lines for a descriptor: 1 or 2."""
        if lines and descriptor not in self._broken:
            self._blocks.append((descriptor, memoryview(lines)))
            self._waiting += len(lines)

    def say(self, text: str) -> None:
        """Add a line of the launcher itself."""
        self.put(2, f"penstock launch: {text}\n".encode())

    def write(self) -> None:
        """Write some bytes of the first block. Raise OSError if it has no reader any more, and drop its lines from now on."""
        descriptor, block = self._blocks.popleft()
        try:
            written = os.write(descriptor, block[:_AT_ONCE])
        except BlockingIOError:
            written = 0
        except OSError:
            self._broken.add(descriptor)
            self._blocks = deque(each for each in self._blocks if each[0] != descriptor)
            self._waiting = sum(len(each) for _, each in self._blocks)
            raise
        self._waiting -= written
        if written < len(block):
            self._blocks.appendleft((descriptor, block[written:]))


_FRAME_SECONDS = 5.0  # between two frames of a progress bar
_LONGEST = 64 << 20  # bytes of a line without an end, after which it is broken
# A line that gloo, which JAX uses for collectives between CPUs, prints for each group of processes.
_CONNECTED = re.compile(rb"^\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number .*\n", re.MULTILINE)
_FRAMES = re.compile(rb"[^\n]*\r[^\n]*")  # a line with a carriage return


class LinePrefixer:
    """The lines of one stream of one rank. One thread uses it.

    Args:
      rank: is put before each line.
      verbose: keep the lines in which gloo says that it is connected.

    Examples:
      >>> from penstock.train.launch.ranks import LinePrefixer
      >>> lines = LinePrefixer(1)
      >>> lines.add(b"one\\ntw", 0.0), lines.add(b"o", 0.0), lines.end()
      (b'[1] one\\n', b'', b'[1] two\\n')
    """

    def __init__(self, rank: int, verbose: bool = False):
        self._verbose = verbose
        self._prefix = f"[{rank}] ".encode()
        self._partial = bytearray()  # the bytes after the last line feed
        self._shown = b""  # the frame of the present line that was written last
        self._when = 0.0  # it was written, in seconds of the caller

    def add(self, data: bytes, now: float) -> bytes:
        """Return the lines that new output completes at a time in seconds, with prefixes; b"" if it completes none."""
        self._partial += data
        feed = self._partial.rfind(b"\n", len(self._partial) - len(data))
        whole, lines = b"", b""
        if feed >= 0:
            whole = bytes(self._partial[: feed + 1])
            del self._partial[: feed + 1]
            lines = self._lines(whole)
            self._shown = b""
        if b"\r" in data:
            lines += self._frame(now)
        if len(self._partial) > _LONGEST:
            lines += self.end()
        return lines

    def end(self) -> bytes:
        """Return what the process wrote after its last line feed, as a line."""
        rest = bytes(self._partial)
        self._partial.clear()
        return self._lines(rest + b"\n") if rest else b""

    def _lines(self, whole: bytes) -> bytes:
        """Return lines with prefixes, each as its last frame. Leave out the first if it is the frame that was shown."""
        if b"\r" in whole:
            first, _, others = whole.partition(b"\n")
            if self._shown and _last_frame(first) == self._shown:
                whole = others
            whole = _FRAMES.sub(lambda line: _last_frame(line[0]), whole)
        if not self._verbose:
            whole = _CONNECTED.sub(b"", whole)
        return self._prefix + whole[:-1].replace(b"\n", b"\n" + self._prefix) + b"\n" if whole else b""

    def _frame(self, now: float) -> bytes:
        """Return the last whole frame of the present line if it is time for one, and drop the frames before it."""
        frames, _, rest = bytes(self._partial).rpartition(b"\r")
        if not _:
            return b""
        frame = _last_frame(frames)
        self._partial[:] = frame + b"\r" + rest
        if not frame or frame == self._shown or now < self._when + _FRAME_SECONDS:
            return b""
        self._shown, self._when = frame, now
        return self._prefix + frame + b"\n"


def _last_frame(line: bytes) -> bytes:
    """Return the last part between carriage returns that is not blank."""
    return next((frame for frame in reversed(line.split(b"\r")) if frame.strip()), b"")


# The signals and the processes.


class SignalPipe:
    """The signals that came since they were last read. Its descriptor is readable if some came. The end of a child is one."""

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
    """Note Ctrl-C, SIGTERM and the ends of processes inside of the `with`. Enter it on the main thread.

    A signal that is ignored stays so: a shell starts its background commands without Ctrl-C.
    """
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    before = {
        number: signal.signal(number, lambda *_: None)
        for number in (*_FORWARDED, signal.SIGCHLD)
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


# -I -S: nothing of the user's environment is imported, so that it starts in milliseconds and cannot fail.
_GUARD = """
import os, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
os.write(1, b".")
os.close(1)
while os.read(0, 4096):
    pass
os.killpg(0, signal.SIGTERM)
time.sleep(float(sys.argv[1]))
os.killpg(0, signal.SIGKILL)
"""


class GuardedGroup:
    """A process group with a guard process, which ends the group if the launcher is killed."""

    def __init__(self, grace: float):
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, str(grace)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )
        assert self._guard.stdout is not None
        self._guard.stdout.read(1)  # it ignores SIGTERM from now on
        self._guard.stdout.close()

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a process of the group, with pipes for its output and no input."""
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            process_group=self._guard.pid,
        )

    def terminate(self) -> None:
        """Send SIGTERM to all that is left in the group; the guard ignores it."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to all that is left in the group, and to the guard."""
        self._send(signal.SIGKILL)

    def close(self) -> None:
        """Kill what is left, and wait for the guard."""
        self.kill()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()

    def _send(self, number: int) -> None:
        # The guard is a child that nobody has waited for, so its number cannot belong to other processes.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._guard.pid, number)
