"""`penstock compare` from end to end, with real processes."""

from __future__ import annotations

import json
import sys

import pytest

from penstock.cli import main

USER = """
import numpy as np

def inputs():
    return np.random.default_rng(0).random(20_000)

def plain(x):
    return np.sort(x)

def stable(x):
    return np.sort(x, kind="stable")

def reversed_(x):
    return np.sort(x)[::-1]

def nothing(x):
    pass
"""


@pytest.fixture
def user(tmp_path, monkeypatch):
    name = f"compared_{tmp_path.name}".replace("-", "_")
    path = tmp_path / f"{name}.py"
    path.write_text(USER)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield str(path)
    sys.modules.pop(name, None)


def compare(*args: str) -> int:
    return main(["compare", *args])


@pytest.mark.slow
def test_functions_are_compared_first_then_take_turns_and_the_files_are_written(user, tmp_path, capsys):
    report = tmp_path / "report"
    args = [f"{user}:plain", f"{user}:stable", "--with", f"{user}:inputs", "--rounds", "4", "--block", "0.05"]
    files = ["--json", f"{report}.json", "--html", f"{report}.html", "--markdown", f"{report}.md"]
    status = compare(*args, *files)
    printed = " ".join(capsys.readouterr().out.split())
    assert status == ("A/A CONTROL FAILED" in printed)  # which one report in a hundred says by chance
    assert "stable takes" in printed
    assert "would have been shown in 8 of 10 such reports" in printed
    assert "equal output before anything was timed" in printed
    document = json.loads((tmp_path / "report.json").read_text())
    (workload,) = document["workloads"]
    assert workload["design"] == "live pairs"
    assert len({*workload["blocks"]["round"]}) == 4
    assert {row["variant"]: row["agreed"] for row in workload["parity"]} == {"plain": True, "stable": True}
    assert "<html" in (tmp_path / "report.html").read_text()
    assert "stable takes" in (tmp_path / "report.md").read_text()


def test_functions_that_compute_something_else_are_not_timed(user, capsys):
    assert compare(f"{user}:plain", f"{user}:reversed_", "--with", f"{user}:inputs", "--minutes", "0.5") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "not timed: it computes something else; output: result is" in printed
    assert "from the one of plain (tolerance 0.001)" in printed
    assert "PARTIAL" not in printed


def test_commands_run_from_start_to_end(capsys):
    python = sys.executable
    assert compare(f"{python} -c 'print(1)'", f"{python} -c pass", "--rounds", "1") == 1  # too few for an answer
    printed = " ".join(capsys.readouterr().out.split())
    assert "fewer than 6 are not judged" in printed
    assert "seconds from start to end" in printed
    assert "prints nothing, so nothing shows that it did its work" in printed
    assert "Each variant ran alone in a fresh process" in printed


def test_a_command_that_fails_is_told_with_what_it_wrote(capsys):
    failing = f"""{sys.executable} -c 'print("why"); raise SystemExit(3)'"""
    assert compare("true", failing, "--rounds", "1") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "exit status 3" in printed
    assert "why" in printed


def test_a_budget_that_is_too_short_for_one_round_says_so(user, capsys):
    assert compare(f"{user}:plain", f"{user}:stable", "--with", f"{user}:inputs", "--minutes", "0.0001") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "PARTIAL: its 0.0001 minutes ended before one round; allow more (--minutes)" in printed
    assert "nothing is claimed" in printed


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["train.py:a"], "train.py:a alone is no comparison"),
        (["no.py:a", "no.py:b"], "is not a file"),
        (["{user}:plain", "true"], "is a function and 'true' is a command"),
        (["no-such-program x", "true"], "'no-such-program' is not a program"),
        (["true", "true", "--with", "{user}:inputs"], "--with is for functions"),
        (["{user}:plain", "{user}:stable", "--block", "0"], "--block 0.0: needs seconds > 0"),
        (["{user}:plain", "{user}:stable", "--json", "/no/such/folder/x.json"], "--json"),
    ],
)
def test_what_cannot_be_compared_is_one_line(user, args, says, capsys):
    assert compare(*(arg.replace("{user}", user) for arg in args)) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("penstock compare: error: ")
    assert error.count("\n") == 1


def test_a_file_that_breaks_when_it_is_imported_says_how(tmp_path, capsys):
    (tmp_path / "breaks_when_imported.py").write_text("1 / 0\n")
    reference = f"{tmp_path}/breaks_when_imported.py:f"
    assert compare(reference, reference) == 2
    assert "cannot be imported: ZeroDivisionError" in capsys.readouterr().err
