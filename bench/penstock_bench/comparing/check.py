"""Check that a user's functions exist, in a process of its own.

The harness does not import their files: what they allocate, on a GPU for example, would be missing in the processes that are
measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from penstock_bench.comparing.functions import load_function
from penstock_bench.comparing.specification import is_function
from penstock_bench.process import IN_WORKER, reason_of

_SECONDS = 600.0


def check_functions(references: Sequence[str]) -> None:
    """Check that functions exist, by importing their files in another process.

    Raises:
      ValueError: one is not written FILE.py:NAME, or does not exist, or its file cannot be imported.
    """
    if unnamed := [reference for reference in references if not is_function(reference)]:
        raise ValueError(f"{unnamed[0]} is not the name of a function in a file, as in train.py:make_inputs")
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        command = [sys.executable, "-m", __name__, str(answer), *references]
        environment = {**os.environ, IN_WORKER: "1"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, env=environment, check=False
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"{references[0]}: importing the files took more than {_SECONDS:g} s") from None
        if not answer.exists():
            raise ValueError(f"{references[0]}: importing the files {reason_of(done.stderr, done.returncode)}")
        if text := answer.read_text():
            raise ValueError(text)


def problem(references: Sequence[str]) -> str:
    """Import the files of functions, and return why one cannot be used; empty if all can."""
    for reference in references:
        try:
            load_function(reference)
        except ValueError as error:
            return str(error)
        except Exception as error:
            return f"{reference.rpartition(':')[0]} cannot be imported: {type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    found = problem(sys.argv[2:])
    Path(sys.argv[1]).write_text(found)
