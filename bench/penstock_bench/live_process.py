"""Start a live variant's process, ask it for blocks, and end it."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock_bench.model import Variant, Workload
from penstock_bench.process import both_ends, kill, reason_of, worker_command, worker_variables
from penstock_bench.working_clock import StoppedTime

_LAST_WORDS = 10.0  # seconds


class EndedError(Exception):
    """A live process that cannot go on.

    Attributes:
      reason: the error, in one line.
      output: the text that it wrote to stdout and stderr.
    """

    def __init__(self, reason: str, output: str):
        super().__init__(reason)
        self.reason, self.output = reason, output


class LiveProcess:
    """The process of a live variant. It is starting until `wait_until_ready` returns; then it waits for requests.

    One thread owns it. A request blocks this thread until the answer is there, the process has ended, or its time limit is over.
    `close` kills the process and all that it has started, and returns after they are gone.

    Args:
      module, workload, variant, size, cache: as for `process.run_variant`.
      variables: more environment variables, which do not replace the user's.
      sliced: whether the process may be stopped during a block (Linux only).

    Attributes:
      worked: seconds that it had for its latest block, without those for which it was stopped.
      slices: the number of pieces in which it had them.

    Raises:
      EndedError: the interpreter cannot be started.
    """

    def __init__(
        self,
        module: str,
        workload: Workload,
        variant: Variant,
        size: str,
        cache: Path,
        variables: Mapping[str, str] | None = None,
        sliced: bool = False,
    ):
        self._time_limit = workload.time_limit
        self.worked, self.slices = 0.0, 0
        self._metric, self._since = "", time.perf_counter()
        self._stopped_at: int | None = None  # nanoseconds
        self._stopped_time = StoppedTime() if sliced else None
        # Files, not pipes: a worker that writes much would wait until somebody reads a pipe.
        self._stdout, self._stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._channel, theirs = socket.socketpair()
        descriptors = [theirs.fileno()]
        command = worker_command(module, workload, variant, size, "--live", str(theirs.fileno()))
        if self._stopped_time is not None:
            descriptors.append(self._stopped_time.descriptor)
            command += ["--stopped", str(self._stopped_time.descriptor)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._stdout,
                stderr=self._stderr,
                env={**(variables or {}), **worker_variables(module, variant, cache)},
                pass_fds=descriptors,
                start_new_session=True,  # so that what the worker starts can be killed, and its use of the processor counted
            )
        except OSError as error:
            self._close_files()
            raise EndedError(f"{command[0]} cannot be started: {error}", "") from None
        finally:
            theirs.close()
        self._lines = self._channel.makefile("rb")

    @property
    def session(self) -> int:
        """Return the id of the session of the process and of all that it has started."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Wait until the variant is warm.

        Raises:
          EndedError: it ended, or took too long.
        """
        self._read()

    def block(self, metric: str, seconds: float) -> float:
        """Let the variant work for about so many seconds, and return the metric's number.

        Raises:
          EndedError: it ended, took too long, or measured no number.
        """
        self.request(metric, seconds)
        self.go_on()
        value = self.answer(math.inf)
        assert value is not None, "an answer that is late raises"
        return value

    def request(self, metric: str, seconds: float) -> None:
        """Ask for a block of about so many seconds, without waiting for it.

        Raises:
          EndedError: it has ended.
        """
        self._metric, self.worked, self._since = metric, 0.0, time.perf_counter()
        self.slices = 1 if self._stopped_at is None else 0
        self._send({"metric": metric, "seconds": seconds})

    def answer(self, within: float) -> float | None:
        """Return the metric's number, or None if it is not there within so many seconds.

        Raises:
          EndedError: it ended, took too long, or measured no number.
        """
        left = max(0.0, self._time_limit - self.worked - (time.perf_counter() - self._since))
        there, _, _ = select.select([self._channel], [], [], min(within, left))
        if not there and within < left:
            return None
        if not there:
            raise self._late()
        self.worked += time.perf_counter() - self._since
        value = self._read().get("value", math.nan)
        if not math.isfinite(value):
            raise EndedError(f"measured no number: {self._metric} is {value}", self._output())
        return float(value)

    def stop(self) -> None:
        """Stop all its processes, and return when the worker is stopped, or has ended. `go_on` and `finish` continue them."""
        if self._stopped_at is None:
            os.killpg(self._process.pid, signal.SIGSTOP)
            # WNOWAIT: its end is for `Popen` to see.
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            self._stopped_at = time.perf_counter_ns()
            self.worked += self._stopped_at / 1e9 - self._since

    def go_on(self) -> None:
        """Let its processes go on. The time since `stop` does not count for the worker's clock."""
        if self._stopped_at is not None:
            assert self._stopped_time is not None, "a process that is stopped was made to be"
            now = time.perf_counter_ns()
            self._stopped_time.add(now - self._stopped_at)
            self._stopped_at, self._since = None, now / 1e9
            self.slices += 1
            os.killpg(self._process.pid, signal.SIGCONT)

    def finish(self) -> dict[str, Any]:
        """Let the variant verify its results, and return them as `worker.result_of` makes them.

        Raises:
          EndedError: it ended, took too long, or its results are wrong.
        """
        self.go_on()
        self._send({"finish": True})
        return self._read()

    def close(self) -> None:
        """End the process, and wait for it. A thread that waits for its answer gets `EndedError` first."""
        kill(self._process)
        self._process.wait()
        self._lines.close()
        self._close_files()

    def _close_files(self) -> None:
        for mine in (self._channel, self._stdout, self._stderr, self._stopped_time):
            if mine is not None:
                mine.close()

    def _send(self, request: Mapping[str, Any]) -> None:
        try:
            self._channel.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise self._ended() from error

    def _read(self) -> dict[str, Any]:
        """Return the next answer."""
        self._channel.settimeout(self._time_limit)
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise self._late() from None
        except OSError as error:
            raise self._ended() from error
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _late(self) -> EndedError:
        return EndedError(f"took more than its {self._time_limit:g} s", self._output())

    def _ended(self) -> EndedError:
        """Return why the process does not answer any more."""
        begin = time.monotonic()
        try:
            status = self._process.wait(_LAST_WORDS)
        except subprocess.TimeoutExpired:
            return EndedError(f"closed its channel, and did not end within {time.monotonic() - begin:.0f} s", self._output())
        if status == 0:
            return EndedError("ended before its last block", self._output())
        return EndedError(reason_of(self._text(self._stderr), status), self._output())

    def _output(self) -> str:
        parts = [self._text(file).strip() for file in (self._stdout, self._stderr)]
        return both_ends("\n".join(part for part in parts if part))

    def _text(self, file: Any) -> str:
        file.seek(0)
        text: str = file.read().decode(errors="replace")
        return text
