from __future__ import annotations

import argparse
import json
import signal

import pytest

from penstock.bench import command
from penstock.bench.suites import SUITES, workloads


def _args(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_arguments(parser)
    return parser.parse_args(args)


def test_unknown_suite_lists_the_choices(capsys):
    with pytest.raises(SystemExit) as exited:
        _args("nonsense")
    assert exited.value.code == 2
    error = capsys.readouterr().err
    assert "nonsense" in error
    assert all(suite in error for suite in SUITES)


def test_unknown_workload_lists_the_choices(capsys):
    with pytest.raises(SystemExit) as exited:
        _args("feed", "--only", "nonsense")
    assert exited.value.code == 2
    error = capsys.readouterr().err
    assert "'nonsense'" in error
    assert all(workload in error for workload in workloads(SUITES["feed"]))


def test_help_of_a_suite_lists_its_workloads_with_their_titles(capsys):
    with pytest.raises(SystemExit):
        _args("feed", "--help")
    printed = " ".join(capsys.readouterr().out.split())
    for name, workload in workloads(SUITES["feed"]).items():
        assert f"{name} {workload.fill(workload.title, 'full')}" in printed


@pytest.mark.parametrize("size", ["full", "quick"])
def test_titles_and_notes_of_the_feed_suite_can_be_filled(size):
    for workload in workloads(SUITES["feed"]).values():
        for text in (workload.title, *(variant.note for variant in workload.variants)):
            assert "{" not in workload.fill(text, size)


@pytest.mark.parametrize("name", ["images", "tokens", "overhead"])
def test_grain_is_measured_with_its_default_threads_and_with_none(name):
    workload = workloads(SUITES["feed"])[name]
    assert "16 threads" in workload.variant("grain C").note
    assert "num_threads=0" in workload.variant("grain C, 0 threads").note
    assert {target.relative_to for target in workload.targets} <= {"grain C", "NumPy loop"}


@pytest.mark.parametrize("rounds", ["0", "-1", "many"])
def test_rounds_must_be_a_positive_number(rounds, capsys):
    with pytest.raises(SystemExit):
        _args("feed", "--rounds", rounds)
    assert f"--rounds: {rounds}: needs an integer >= 1" in capsys.readouterr().err


@pytest.mark.parametrize(("workload", "status"), [("plain", 0), ("missing", 0), ("failing", 1)])
def test_status_is_1_only_where_a_variant_failed(suite, workload, status, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(SUITES, "fake", suite)
    written = tmp_path / "out.json", tmp_path / "out.md"
    arguments = ["fake", "--quick", "--only", workload, "--json", str(written[0]), "--markdown", str(written[1])]
    assert command.run(_args(*arguments)) == status
    assert "one" in capsys.readouterr().out
    loaded = json.loads(written[0].read_text())
    assert [outcome["name"] for outcome in loaded["workloads"]] == [workload]
    assert (loaded["size"], loaded["rounds"]) == ("quick", 1)
    assert f"## {workload}" in written[1].read_text()


@pytest.mark.parametrize("flag", ["--json", "--markdown"])
def test_file_that_cannot_be_written_is_told_before_anything_is_measured(flag, tmp_path, capsys):
    path = tmp_path / "no folder" / "out"
    assert command.run(_args("feed", flag, str(path))) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{flag} {path}: cannot be written (No such file or directory)" in printed.err


def test_files_have_the_workloads_that_were_done_when_the_run_ended(suite, monkeypatch, tmp_path):
    monkeypatch.setitem(SUITES, "fake", suite)
    written = tmp_path / "out.json", tmp_path / "out.md"
    arguments = ["fake", "--quick", "--only", "plain", "--only", "interrupting"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
    try:
        with pytest.raises(KeyboardInterrupt):
            command.run(_args(*arguments, "--json", str(written[0]), "--markdown", str(written[1])))
    finally:
        signal.signal(signal.SIGINT, before)
    assert [outcome["name"] for outcome in json.loads(written[0].read_text())["workloads"]] == ["plain"]
    assert "## plain" in written[1].read_text()


_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("images", "tokens", "overlap", "overhead", "memory")]


@pytest.mark.parametrize("workload", ["restore", *_SLOW])
def test_feed_suite_runs_and_every_variant_passes_its_verification(workload, tmp_path, capsys):
    path = tmp_path / "out.json"
    status = command.run(_args("feed", "--quick", "--only", workload, "--json", str(path)))
    assert status == 0, capsys.readouterr().out
    (outcome,) = json.loads(path.read_text())["workloads"]
    ran = {sample["variant"] for sample in outcome["samples"]} | {missing["variant"] for missing in outcome["missing"]}
    assert ran == set(outcome["notes"])
    assert all(value >= 0 for sample in outcome["samples"] for value in sample["values"].values())
