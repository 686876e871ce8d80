from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from penstock import cli
from penstock.bench.suites.shard import WORKLOADS, command, find
from penstock.bench.suites.shard.case import Attempt, Case, Planned, Prediction, Score, Training, case_from_json
from penstock.bench.suites.shard.measure import score_of
from penstock.bench.suites.shard.report import Report, as_json, as_markdown, print_report
from penstock.bench.suites.shard.task import Task
from penstock.bench.suites.shard.time_limit import time_limit
from penstock.shard.hlo.analysis import Measured
from penstock.shard.hlo.collectives import Collective

MACHINE = {
    "date": "now",
    "usable_cores": 2,
    "cpu": "a|b",
    "python": "3",
    "versions": {"jax": "1"},
    "known_cases": [],
    "penstock": "0",
    "commit": None,
}
SCORE = Score(1e-3, 2**20, 100, 1000.0, 1e9, ("2 all-reduce over data",))
CASE = Case(
    "mlp",
    "8",
    (Attempt("data parallel", SCORE), Attempt("Megatron", None, "does not compile: why")),
    (
        Planned("loose", 2**30, 1.0, SCORE, Prediction(100, 2**20, 1000.0)),
        Planned("half", 2**19, 1.0, reason="no layout fits", refused=True),
    ),
    Training((2.0,), (2.0,), "loose"),
)


def report(*cases: Case, partial: str | None = None) -> Report:
    return Report("tpu-v5e", cases, MACHINE, 60.0, partial)


def test_a_case_goes_through_json_and_back():
    assert case_from_json(json.loads(json.dumps(asdict(CASE)))) == CASE


def test_everything_is_in_the_json():
    document = json.loads(as_json(report(CASE)))
    assert case_from_json(document["cases"][0]) == CASE
    assert [cell["ratio"] for cell in document["cells"]] == [1.0, None]
    assert document["targets"][0]["met"] is True


def test_nothing_is_missing_in_silence(capsys):
    print_report(Console(width=200), report(CASE, partial="interrupted"))
    printed = capsys.readouterr().out
    for text in (printed, as_markdown(report(CASE, partial="interrupted"))):
        assert "PARTIAL: interrupted." in text
        assert "mlp on 8: Megatron: does not compile: why" in text
        assert "mlp on 8: half: no plan: no layout fits" in text
        assert "MISSED: time at most 0.9×" in text


def test_what_is_unknown_of_a_score_is_said_beside_it(capsys):
    unsure = replace(SCORE, unknown=("1 loop of unknown length counts once",))
    case = replace(CASE, baselines=(Attempt("FSDP", unsure),), plans=(replace(CASE.plans[0], score=unsure),))
    assert case_from_json(json.loads(as_json(report(case)))["cases"][0]) == case
    print_report(Console(width=200), report(case))
    for text in (capsys.readouterr().out, as_markdown(report(case))):
        assert "mlp on 8: loose: 1 loop of unknown length counts once" in text
        assert "mlp on 8: FSDP: 1 loop of unknown length counts once" in text


def test_a_score_has_what_is_unknown_of_the_program():
    guess = Collective("reduce-scatter", 512, 8, 2.0, ("data",), guessed=True)
    found = score_of(Measured(1, 1, 1, 1, 1e9, (guess,), 0.0, ("why",)), "tpu-v5e")
    assert found.unknown == ("why",)
    assert found.collectives == ("2 reduce-scatter over data (guessed)",)


def test_a_model_that_is_none_is_told_before_anything_runs(capsys):
    assert cli.main(["bench", "shard", "--only", "gpt9"]) == 2
    assert "--only gpt9: is not in the zoo; choose from mlp, " in capsys.readouterr().err


def test_hardware_that_is_none_is_told_before_anything_runs(capsys):
    assert cli.main(["bench", "shard", "--hardware", "abacus"]) == 2
    assert 'hardware "abacus" is not known' in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_plans_scores_and_trains(tmp_path, capsys):
    path, page = tmp_path / "out.json", tmp_path / "out.md"
    arguments = ["--only", "mlp", "--mesh", "2x4", "--json", str(path), "--markdown", str(page)]
    assert cli.main(["bench", "shard", *arguments]) == 0, capsys.readouterr().out
    document = json.loads(path.read_text())
    assert document["partial"] is None
    (case,) = document["cases"]
    assert [plan["limit"] for plan in case["plans"]] == ["loose", "half"]
    scores = {attempt["name"]: attempt["score"] for attempt in case["baselines"]}
    replicated, sharded = scores["data parallel"], scores["FSDP"]
    assert sharded["arguments"] < replicated["arguments"] / 4
    assert case["plans"][1]["limit_bytes"] == replicated["memory"] // 2
    assert scores["google-parallax"] is None
    losses = case["training"]["alone"]
    assert len(losses) == 3
    assert losses == pytest.approx(case["training"]["planned"], rel=1e-4)
    assert "| mlp | 2x4 | half |" in page.read_text()


def test_what_takes_too_long_is_given_up():
    with pytest.raises(TimeoutError, match=r"took more than 0.05 s"):
        with time_limit(0.05):
            time.sleep(10)


def test_a_run_that_is_interrupted_keeps_what_it_has_and_says_so(tmp_path, monkeypatch, capsys):
    def plan(task: Task, folder: Path) -> Case:
        if task.mesh == "2x4":
            raise KeyboardInterrupt
        return CASE

    path = tmp_path / "out.json"
    monkeypatch.setattr(command, "_plan", plan)
    assert cli.main(["bench", "shard", "--only", "mlp", "--no-train", "--json", str(path)]) == 130
    document = json.loads(path.read_text())
    assert document["partial"] == "interrupted after 1 of 3 models and meshes"
    assert [case["mesh"] for case in document["cases"]] == ["8"]
    assert "PARTIAL: interrupted after 1 of 3" in capsys.readouterr().out


def test_status_is_1_where_something_failed_and_0_where_a_target_was_missed(tmp_path, monkeypatch):
    arguments = ["bench", "shard", "--only", "mlp", "--mesh", "8", "--no-train"]
    monkeypatch.setattr(command, "_plan", lambda task, folder: CASE)
    assert cli.main(arguments) == 0
    monkeypatch.setattr(command, "_plan", lambda task, folder: Case("mlp", "8", failure="ended by signal 6"))
    assert cli.main(arguments) == 1


def test_workers_find_tasks_and_the_workloads_of_all_suites_by_name():
    for workload in WORKLOADS:
        assert find(workload.name) is workload
    assert find("gpt2/2x4/h100").sizes["full"] == Task("gpt2", "2x4", "h100")
