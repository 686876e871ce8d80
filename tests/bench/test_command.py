from __future__ import annotations

import argparse
import json

import pytest

from penstock.bench import command
from penstock.bench.suites import SUITES


def _args(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
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
    assert command.run(_args("feed", "--only", "nonsense")) == 2
    output = " ".join(capsys.readouterr().out.split())
    assert "'nonsense'" in output
    assert "images, tokens, overlap, overhead, memory, restore" in output


@pytest.mark.parametrize("rounds", ["0", "-1", "many"])
def test_rounds_must_be_a_positive_number(rounds, capsys):
    with pytest.raises(SystemExit):
        _args("feed", "--rounds", rounds)
    assert "--rounds" in capsys.readouterr().err


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
