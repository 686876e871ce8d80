"""Start a live variant's process, ask it for blocks, and end it."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.bench.model import Variant, Workload
from penstock.bench.process import both_ends, kill, reason_of, worker_command, worker_variables

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
      variables: more environment variables, which do not replace those of the user.

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
    ):
        self._time_limit = workload.time_limit
        # Files, not pipes: a worker that writes much would wait until somebody reads a pipe.
        self._stdout, self._stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._channel, theirs = socket.socketpair()
        command = worker_command(module, workload, variant, size, "--live", str(theirs.fileno()))
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._stdout,
                stderr=self._stderr,
                env={**(variables or {}), **worker_variables(module, variant, cache)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that what the worker starts can be killed, and its use of the processor counted
            )
        except OSError as error:
            for mine in (self._channel, self._stdout, self._stderr):
                mine.close()
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
        value = self._ask({"metric": metric, "seconds": seconds}).get("value", math.nan)
        if not math.isfinite(value):
            raise EndedError(f"measured no number: {metric} is {value}", self._output())
        return float(value)

    def finish(self) -> dict[str, Any]:
        """Let the variant verify its results, and return them as `worker.result_of` makes them.

        Raises:
          EndedError: it ended, took too long, or its results are wrong.
        """
        return self._ask({"finish": True})

    def close(self) -> None:
        """End the process, and wait for it. A thread that waits for its answer gets `EndedError` first."""
        kill(self._process)
        self._process.wait()
        self._lines.close()
        self._channel.close()
        self._stdout.close()
        self._stderr.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._channel.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise self._ended() from error
        return self._read()

    def _read(self) -> dict[str, Any]:
        """Return the next answer."""
        self._channel.settimeout(self._time_limit)
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise EndedError(f"took more than its {self._time_limit:g} s", self._output()) from None
        except OSError as error:
            raise self._ended() from error
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

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
