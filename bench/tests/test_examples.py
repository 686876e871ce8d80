"""The example of a benchmark runs as it stands."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "recipes" / "own_benchmark.py"


@pytest.mark.slow
def test_the_benchmark_of_a_reader_runs():
    command = [sys.executable, "-m", "penstock", "bench", EXAMPLE, "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout
