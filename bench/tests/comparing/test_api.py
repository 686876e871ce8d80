from __future__ import annotations

import functools
import subprocess
import sys

import pytest

import penstock_bench
from penstock_bench.comparing.api import reference_of

SCRIPT = """
import penstock_bench
import numpy as np

def a(x):
    return x + x

def b(x):
    return 2 * x

def inputs():
    return np.ones(1000)

{guard}
    result = penstock_bench.compare({{"a": a, "b": b}}, inputs, minutes=0.6, block_seconds=0.02)
    print(result)
    print(result.sentences, result.ratios)
"""


def run(tmp_path, guard: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script_of_a_user.py"
    script.write_text(SCRIPT.format(guard=guard))
    return subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
def test_a_script_compares_its_own_functions(tmp_path):
    done = run(tmp_path, 'if __name__ == "__main__":')
    assert done.returncode == 0, done.stderr
    assert "b takes" in done.stdout
    assert "Live pairs." in done.stdout


def test_a_script_that_compares_when_it_is_imported_is_told(tmp_path):
    done = run(tmp_path, "if True:")
    assert "call it under if __name__ == '__main__'" in done.stdout + done.stderr


def test_what_a_process_cannot_import_is_named():
    for function in (lambda: 1, functools.partial(print, 1), test_a_script_compares_its_own_functions.__class__):
        with pytest.raises(ValueError, match="which a new process cannot import"):
            reference_of("it", function)
    assert reference_of("it", run).endswith("test_api.py:run")


def test_one_function_is_no_comparison():
    with pytest.raises(ValueError, match="1 function is no comparison"):
        penstock_bench.compare({"a": run})


@pytest.mark.slow
def test_functions_that_do_different_things_are_an_error_that_says_so(tmp_path):
    script = tmp_path / "script_of_a_user.py"
    script.write_text(SCRIPT.format(guard='if __name__ == "__main__":').replace("2 * x", "3 * x"))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert "RuntimeError: b: not timed: it computes something else" in done.stderr
