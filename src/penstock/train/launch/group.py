"""A process group that ends with its launcher, however the launcher ends.

The group is that of a *guard*: a small process which does nothing but read from a pipe. Only the launcher has the other end. If
the launcher ends, also by SIGKILL, the system closes that end. Then the guard ends all processes of the group: by SIGTERM, and
by SIGKILL after the grace period. Ranks enter the group before their first instruction, and all that they start is in it too,
so there is no moment at which a process could be missed. Only a process that leaves the group by itself (`setsid`) is not
ended.

This needs nothing but process groups and pipes, so it holds on Linux and on macOS alike. It does not hold if somebody kills the
guard too, as `kill -9 -1` does, or if the machine has no memory left for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

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
    """A process group with its guard. Only the main thread of the launcher uses it.

    Args:
      grace: seconds between SIGTERM and SIGKILL if the launcher is killed.
    """

    def __init__(self, grace: float):
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, str(grace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
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
