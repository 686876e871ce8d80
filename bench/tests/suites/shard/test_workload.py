from __future__ import annotations

import json
import time
from dataclasses import asdict, replace

import pytest

from penstock import cli
from penstock.shard.hlo.analysis import Measured
from penstock.shard.hlo.collectives import Collective
from penstock.shard.mesh.hardware import find_hardware
from penstock_bench import progress, rounds
from penstock_bench.model import Measurement
from penstock_bench.process import Finished
from penstock_bench.suites.shard import WORKLOADS, find
from penstock_bench.suites.shard.comparison import measurements
from penstock_bench.suites.shard.planning import score_of
from penstock_bench.suites.shard.scores import BaselineScore, PlanScore, Prediction, Score
from penstock_bench.suites.shard.task import Task
from penstock_bench.suites.shard.time_limit import time_limit
from penstock_bench.suites.shard.zoo import ZOO
from penstock_bench.worker import result_of

TASK = Task("mlp", "8")
SCORE = Score(1e-3, 2**20, 100, 1000.0, 1e9, ("2 all-reduce over data",))
BASELINES = (BaselineScore("data parallel", SCORE), BaselineScore("Megatron", None, "does not compile: why"))
LOOSE = PlanScore("loose", 2**30, 1.0, score=SCORE, predicted=Prediction(100, 2**20, 1000.0))
REFUSED = PlanScore("half", 2**19, 1.0, reason="no layout fits", refused=True)
BROKEN = PlanScore("half", 2**19, 1.0, reason="planning failed: KeyError")


def measured(*plans: PlanScore, baselines=BASELINES) -> Finished:
    """Return the result of a process of this task that has ended."""
    found = Measurement(parts=measurements(TASK, baselines, plans, []))
    return Finished(None, "", json.loads(json.dumps(result_of(found))))


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Run the command with a worker that does nothing but give this; the status, the JSON, Markdown, and page."""

    def run(finished, *arguments: str) -> tuple[int, dict, str, str]:
        give = finished if callable(finished) else lambda variant: finished
        monkeypatch.setattr(rounds, "run_variant", lambda module, workload, variant, *more: give(variant.name))
        monkeypatch.setattr(progress, "lacks", lambda variant: None)  # as the worker needs no library
        paths = [tmp_path / f"out.{kind}" for kind in ("json", "markdown", "html")]
        files = [part for path in paths for part in (f"--{path.suffix[1:]}", str(path))]
        status = cli.main(["bench", "shard", "--only", "mlp", *arguments, *files])
        return status, json.loads(paths[0].read_text()), paths[1].read_text(), paths[2].read_text()

    return run


def test_everything_is_in_the_json(bench):
    _, document, _, _ = bench(measured(LOOSE, REFUSED), "--mesh", "8", "--no-train")
    (workload,) = document["workloads"]
    loose, half = workload["samples"]
    assert (loose["variant"], half["variant"]) == ("mlp 8 loose", "mlp 8 half")
    assert loose["details"]["baselines"] == json.loads(json.dumps([asdict(each) for each in BASELINES]))
    assert loose["details"]["plan"] == json.loads(json.dumps(asdict(LOOSE)))
    assert loose["values"]["time"] == 1.0
    assert "time" not in half["values"]
    assert workload["targets"][0]["met"] is True
    assert "No" not in document["verdict"]["sentences"][0]


def test_nothing_is_missing_in_silence(bench, capsys):
    _, _, markdown, page = bench(measured(LOOSE, REFUSED), "--mesh", "8", "--no-train")
    for text in (" ".join(capsys.readouterr().out.split()), markdown, page):
        assert "all variants: Megatron: does not compile: why" in text
        assert "mlp 8 half: no plan: no layout fits" in text
        assert "at least half of the variants: at most 0.9 × best by hand: 0 of 1 (median 1), NOT MET" in text
        assert "not counted: 1, nothing fits" in text
        assert "refusals, the total of all: at most 0 where a baseline fits: 1 of 1 (total 0), met; not counted: 1" in text
    for text in (markdown, page):
        assert "2 all-reduce over data" in text
        assert "1 ms, 1 MiB" in text


def test_what_is_unknown_of_a_score_is_said_beside_it(bench, capsys):
    unsure = replace(SCORE, unknown=("1 loop of unknown length counts once",))
    finished = measured(replace(LOOSE, score=unsure), REFUSED, baselines=(BaselineScore("FSDP", unsure),))
    _, _, markdown, page = bench(finished, "--mesh", "8", "--no-train")
    for text in (" ".join(capsys.readouterr().out.split()), markdown, page):
        assert "mlp 8 loose: the plan: 1 loop of unknown length counts once" in text
        assert "all variants: FSDP: 1 loop of unknown length counts once" in text


def test_a_score_has_what_is_unknown_of_the_program():
    guess = Collective("reduce-scatter", 512, 8, 2.0, ("data",), guessed=True)
    found = score_of(Measured(1, 1, 1, 1, 1e9, (guess,), 0.0, ("why",)), find_hardware("tpu-v5e"), "float32", {"data": 8})
    assert found.unknown == ("why",)
    assert found.collectives == ("2 reduce-scatter over data (guessed)",)


def test_a_model_that_is_none_is_told_before_anything_runs(capsys):
    assert cli.main(["bench", "shard", "--only", "gpt9"]) == 2
    assert "--only gpt9: is not in --suite zoo; choose from mlp, " in capsys.readouterr().err


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
    plans, training = document["workloads"]
    loose, half, tight = (sample["details"] for sample in plans["samples"] if "plan" in sample["details"])
    assert "FSDP" in [sample["details"]["own"]["name"] for sample in plans["samples"] if "own" in sample["details"]]
    assert [each["plan"]["limit"] for each in (loose, half, tight)] == ["loose", "half", "tight"]
    scores = {each["name"]: each["score"] for each in loose["baselines"]}
    replicated, sharded = scores["data parallel"], scores["FSDP"]
    assert sharded["arguments"] < replicated["arguments"] / 4
    assert half["plan"]["limit_bytes"] == replicated["memory"] // 2
    assert tight["plan"]["limit_bytes"] == int(1.02 * min(score["memory"] for score in scores.values() if score))
    losses = training["samples"][0]["details"]["losses"]
    assert len(losses["alone"]) == 3
    assert losses["alone"] == pytest.approx(losses["planned"], rel=1e-4)
    assert "| mlp 2x4 half |" in page.read_text()


def test_what_takes_too_long_is_given_up():
    with pytest.raises(TimeoutError, match=r"took more than 0.05 s"):
        with time_limit(0.05):
            time.sleep(10)


def test_a_run_that_is_interrupted_keeps_what_it_has_and_says_so(bench, capsys):
    def give(name: str) -> Finished:
        if name == "mlp 2x4":
            raise KeyboardInterrupt
        return measured(LOOSE, REFUSED)

    status, document, _, _ = bench(give, "--no-train")
    assert status == 130
    assert document["partial"] == "interrupted in round 1"
    assert [sample["variant"] for sample in document["workloads"][0]["samples"]] == ["mlp 8 loose", "mlp 8 half"]
    assert "PARTIAL: interrupted in round 1" in capsys.readouterr().out


def test_files_are_written_after_each_task(bench, tmp_path):
    seen = []

    def give(name: str) -> Finished:
        document = json.loads((tmp_path / "out.json").read_text())
        seen.append((document["partial"], len(document["workloads"][0]["samples"])))
        return measured(LOOSE, REFUSED)

    bench(give, "--no-train")
    assert [samples for _, samples in seen] == [0, 2, 4]
    assert all(partial.startswith("not finished") for partial, _ in seen)


@pytest.mark.parametrize(
    ("finished", "status"),
    [
        (measured(LOOSE, REFUSED), 0),
        (measured(LOOSE, BROKEN), 1),
        (Finished("ended by signal 6", "", None), 1),
    ],
)
def test_status_is_1_where_something_failed_and_0_where_a_target_was_missed(bench, finished, status):
    found, document, markdown, _ = bench(finished, "--mesh", "8", "--no-train")
    assert found == status
    if status:
        (failure,) = document["workloads"][0]["failures"]
        assert failure["reason"] in markdown


def test_training_without_a_plan_is_left_out(bench):
    alone = Finished(
        None, "", result_of(Measurement(remarks=replace(Measurement().remarks, exempt={"difference": "there is no plan"})))
    )
    status, document, _, _ = bench(alone, "--mesh", "8", "--train")
    assert status == 0
    assert document["workloads"][1]["targets"][0]["met"] is None


def test_workers_find_workloads_and_their_variants_by_name():
    for workload in WORKLOADS:
        assert find(workload.name) is workload
    for name in ("zoo-cpu-h100", "zoo-v5e:2x4", "outside-cpu-tpu-v5e", "training-zoo-v5e:2x4", "real", "planning-real"):
        assert find(name).name == name
    found = find("zoo-cpu-h100")
    assert found.sizes["full"].hardware == "h100"
    assert [variant.name for variant in found.variants] == [f"{model} {mesh}" for model in ZOO for mesh in ("8", "2x4", "2x2x2")]
