import subprocess
import sys

import pytest

import penstock
from penstock import cli
from penstock.cli import main
from penstock.recipes import digits


def exit_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_version_is_that_of_the_package(capsys):
    assert exit_of(["--version"], capsys) == (0, f"penstock {penstock.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["train", "--version", "example:"]),
        (["train", "--help"], ["digits", "text", "penstock[train]"]),
        (["train", "digits", "--help"], ["--steps", "1000", "--batch-size", "64", "--out", "runs/digits-"]),
        (["train", "text", "--help"], ["--data", "--context", "128", "--out", "runs/text-"]),
    ],
)
def test_help_lists_commands_flags_and_defaults(arguments, words, capsys):
    code, out, _ = exit_of(arguments, capsys)
    assert code == 0
    assert [word for word in words if word not in out] == []
    assert out.isascii() or "train" not in arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["penstock: error:", "command", "penstock --help"]),
        (["fly"], ["'fly'", "train", "bench"]),
        (["train"], ["recipe"]),
        (["train", "cifar"], ["'cifar'", "digits", "penstock train --help"]),
        (
            ["train", "digits", "--stepz", "4"],
            ["penstock train digits: error:", "did you mean --steps", "digits --help"],
        ),
        (["train", "text", "more"], ["penstock train text: error:", "unrecognized arguments: more; see"]),
        (["doctor", "--jsn"], ["penstock doctor: error:", "did you mean --json"]),
        (["plan", "train:job", "--device=8", "--verifi"], ["penstock plan: error:", "did you mean --verify"]),
        (["train", "digits", "--steps", "many"], ["--steps", "'many'"]),
        (["train", "digits", "--steps", "0"], ["--steps 0", ">= 1"]),
        (["train", "digits", "--batch-size", "12"], ["--batch-size 12", "8 devices", "multiple"]),
        (["train", "text", "--context", "0"], ["--context 0", ">= 1"]),
        (["train", "text", "--data", "missing.txt"], ["--data missing.txt", "No such file", "name a file"]),
    ],
)
def test_bad_arguments_exit_with_2_and_one_line(arguments, words, capsys):
    code, out, err = exit_of(arguments, capsys)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert [word for word in words if word not in err] == []


@pytest.mark.parametrize("command", ["bench", "compare"])
def test_a_command_of_penstock_bench_says_how_to_install_it(command, monkeypatch, capsys):
    monkeypatch.setattr(cli, "entry_points", lambda **_: ())
    for arguments in ([command], [command, "--help"], [command, "feed", "--quick"]):
        code, out, err = exit_of(arguments, capsys)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "pip install -e bench" in err


def test_ctrl_c_exits_with_130_and_one_line(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(digits, "train", interrupt)
    assert exit_of(["train", "digits"], capsys) == (130, "", "penstock: interrupted\n")


def test_module_runs_as_the_command():
    command = [sys.executable, "-m", "penstock", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("penstock ")
