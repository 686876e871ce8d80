"""The commands that this distribution adds to `penstock`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.test_cli import exit_of


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "--help"], ["feed", "bench[suites]", "example:"]),
        (["bench", "feed", "--help"], ["--quick", "--until-precise", "--only", "images", "--json", "example:"]),
        (["bench", "frameworks", "--help"], ["--model", "--precision", "fused", "bf16", "JAX", "example:"]),
        (["bench", "all", "--help"], ["--quick", "--html", "overlap", "example:"]),
        (["compare", "--help"], ["--with", "--tolerance", "examples:"]),
    ],
)
def test_help_lists_commands_flags_and_defaults(arguments, words, capsys):
    code, out, _ = exit_of(arguments, capsys)
    assert code == 0
    assert [word for word in words if word not in out] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "feed", "--rounds", "x"], ["--rounds", "x: needs an integer >= 1", "penstock bench feed --help"]),
        (["bench", "feed", "--only", "x"], ["--only", "'x'", "images"]),
        (["bench", "nonsense"], ["'nonsense'", "feed", "frameworks", "all"]),
        (["bench", "missing.py"], ["missing.py", "is not a file"]),
        (["bench", "frameworks", "--variant", "caffe"], ["--variant caffe", "PyTorch eager", "Keras on JAX"]),
        (["bench", "frameworks", "--model", "huge"], ["--model 'huge'", "tiny, small, base"]),
        (["compare", "train.py:a"], ["train.py:a", "alone is no comparison"]),
    ],
)
def test_bad_arguments_exit_with_2_and_one_line(arguments, words, capsys):
    code, out, err = exit_of(arguments, capsys)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert [word for word in words if word not in err] == []


def test_the_commands_load_no_optional_library():
    code = (
        "import sys; import penstock.cli as cli; cli._parser(['bench']); "
        "print([m for m in ('flax', 'optax', 'sklearn', 'matplotlib', 'datasets', 'torch', 'grain') if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "[]\n"
