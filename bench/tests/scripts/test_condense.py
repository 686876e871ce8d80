"""`bench/scripts/condense.py` keeps the medians, intervals and environment of reports, and no samples."""

import importlib.util
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock_bench import machine
from penstock_bench.json_report import as_document
from penstock_bench.model import Measurement, Metric, Target, Variant, Workload
from penstock_bench.outcome import Outcome, Run, Sample
from penstock_bench.suites.shard.comparison import measurements
from penstock_bench.suites.shard.scores import BaselineScore, PlanScore, Prediction, Score
from penstock_bench.suites.shard.task import Task

PATH = Path(__file__).parents[2] / "scripts" / "condense.py"
VALUES = {"a": [10.0, 10.1, 9.9, 10.0, 10.2, 9.8], "b": [4.0, 4.1, 4.0, 3.9, 4.05, 3.95]}


@dataclass(frozen=True)
class _Size:
    records: int = 7


def timed(factor: float = 1.0) -> dict:
    """Return a report of two variants, the second of which takes `factor` times as long as usual."""
    variants = tuple(Variant(name, lambda size: Measurement()) for name in VALUES)
    target = Target("b", "m", 0.5, "a")
    workload = Workload("pace", "records", (Metric("m", "ms", "lower"),), "a", variants, {"full": _Size()}, targets=(target,))
    samples = [
        Sample(name, again, number, 0, 0.0, 1.0, 0.5, {"m": value * (factor if name == "b" else 1)}, {"m": [value]}, {})
        for name, again in (("a", False), ("b", False), ("a", True))
        for number, value in enumerate(VALUES[name])
    ]
    run = Run("feed", "full", 9, machine.describe(), (Outcome(workload, "full", "a", tuple(samples)),), 90.0, None)
    return json.loads(json.dumps(as_document(run)))


def scored(seconds: float) -> dict:
    """Return a report of one plan, whose program takes `seconds`."""
    task = Task("mlp", "8")
    plan = PlanScore(
        "loose", 2**24, 1.0, mesh="data 8", score=Score(seconds, 2**20, 100, 1000.0, 1e9), predicted=Prediction(1, 2, 3.0)
    )
    made = measurements(task, (BaselineScore("FSDP", Score(2e-3, 2**21, 100, 2000.0, 1e9)),), [plan], ())
    samples = [
        {"variant": f"{task.name} {part}", "values": each.values, "details": each.details, "remarks": asdict(each.remarks)}
        for part, each in made.items()
    ]
    return json.loads(json.dumps({**timed(), "workloads": [{"scored": True, "samples": samples}]}))


def condensed(tmp_path, monkeypatch, capsys, *reports: dict) -> list[dict]:
    """Return what the script prints for these reports."""
    spec = importlib.util.spec_from_file_location("condense", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    paths = [tmp_path / f"{number}.json" for number in range(len(reports))]
    for path, report in zip(paths, reports, strict=True):
        path.write_text(json.dumps(report))
    monkeypatch.setattr(sys, "argv", ["condense.py", "--command", "penstock bench feed", *map(str, paths)])
    module.main()
    return json.loads(capsys.readouterr().out)["reports"]


def test_medians_ratios_and_the_environment_are_kept_and_no_samples(tmp_path, monkeypatch, capsys):
    [report] = condensed(tmp_path, monkeypatch, capsys, timed(1 / 3))
    assert report["command"] == "penstock bench feed"
    assert any("Python" in line for line in report["machine"])
    [workload] = report["workloads"]
    assert ["b", 6, 1.33333, 1.3, 1.36667] in workload["metrics"]["m, ms"]
    columns, *ratios = workload["ratios"]
    ratio = next(found for found in (dict(zip(columns, row, strict=True)) for row in ratios) if found["variant"] == "b")
    assert ratio["low"] < ratio["ratio"] < ratio["high"]
    assert "samples" not in json.dumps(report)


def test_of_a_score_in_several_reports_the_last_one_counts(tmp_path, monkeypatch, capsys):
    first, last = condensed(tmp_path, monkeypatch, capsys, scored(1e-3), scored(4e-3))
    assert first["scores"] == {}
    assert last["scores"]["cpu: mlp 8 loose"]["plan"] == [0.004, 2**20, 1000.0]
    assert last["scores"]["cpu: mlp 8, by hand"] == {"FSDP": [0.002, 2**21, 2000.0]}
