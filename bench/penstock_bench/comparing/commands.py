"""Run a user's command from start to end, and time it."""

from __future__ import annotations

import shlex
import subprocess
import time
from typing import Any

from penstock_bench.model import Measurement, Remarks, VerificationError

_SHOWN = 2_000  # characters of what a failed command wrote


def measure(command: str, size: Any) -> Measurement:
    """Run a command, and return its seconds.

    Raises:
      VerificationError: it cannot be started, or its exit status is not 0.
    """
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            shlex.split(command), check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        raise VerificationError(f"{command}: cannot be started: {error.strerror}") from None
    seconds = time.perf_counter() - begin
    written = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        print(written[-_SHOWN:])  # the report shows what a failed variant wrote
        raise VerificationError(f"{command}: exit status {done.returncode}")
    notes = [] if written.strip() else ["prints nothing, so nothing shows that it did its work: let it print a result"]
    return Measurement({"time": seconds}, {"characters that it printed": len(written)}, remarks=Remarks(notes=notes))
