"""`bench/scripts/shard_table.py` makes tables of the reports."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path

from penstock_bench.suites.shard.comparison import measurements
from penstock_bench.suites.shard.scores import BaselineScore, OwnBaseline, PlanScore, Prediction, Score
from penstock_bench.suites.shard.task import Compiler, Task

PATH = Path(__file__).parents[3] / "scripts" / "shard_table.py"
MIB = 2**20


def score(seconds: float, memory: int = MIB) -> Score:
    return Score(seconds, memory, 100, 1000.0, 1e9, seconds_with_latency=2 * seconds**0.5)


def planned(limit: str, size: int, seconds: float, gap: float | None = None) -> PlanScore:
    predicted = Prediction(100, int(1.05 * MIB), 1000.0)
    return PlanScore(limit, size, 1.0, mesh="data 8", score=score(seconds), predicted=predicted, gap=gap)


BASELINES = (BaselineScore("FSDP", score(2e-3)),)
OWN = (OwnBaseline("ZeRO-1", Prediction(100, 2 * MIB, 1000.0), score(1.0)),)


def report(task: Task, plans: list[PlanScore]) -> dict:
    """Return what the script reads of a report."""
    samples = [
        {"variant": f"{task.name} {part}", "values": made.values, "details": made.details, "remarks": asdict(made.remarks)}
        for part, made in measurements(task, BASELINES, plans, OWN).items()
    ]
    return json.loads(json.dumps({"workloads": [{"samples": samples}]}))


def lines(*reports: dict) -> list[str]:
    spec = importlib.util.spec_from_file_location("shard_table", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.tables(reports))


def test_a_row_has_all_compilers_and_limits_and_the_largest_proved_gap():
    nothing = PlanScore("tight", MIB // 2, 1.0, reason="no layout fits", refused=True)
    cpu = report(Task("mlp", "8"), [planned("loose", 2 * MIB, 1e-3, 0.0), planned("half", 2 * MIB, 1e-3, 0.004), nothing])
    refused = PlanScore("half", 2 * MIB, 1.0, reason="no layout fits", refused=True)
    tpu = report(Task("mlp", "8", Compiler("v5e:2x4")), [planned("loose", MIB // 2, 1e-3), refused])
    found = lines(cpu, tpu)
    assert "| step, mesh | cpu, loose | cpu, half | cpu, tight | v5e:2x4, loose | v5e:2x4, half | cpu, proved gap |" in found
    assert "| mlp, 8 | 0.50 (0.71) | 0.50 (0.71) | – | – | **refused** | 0.40 % |" in found


def test_errors_of_predictions_are_by_suite_and_compiler():
    found = lines(report(Task("bert", "2x4", suite="outside"), [planned("loose", 2 * MIB, 1e-3)]), report(Task("mlp", "8"), []))
    assert "| outside | cpu | 2 | 52.5 % | 100.0 % |" in found
    assert "| zoo, calibrated on it | cpu | 1 | 100.0 % | 100.0 % |" in found


def test_the_last_report_counts():
    first, last = (report(Task("mlp", "8"), [planned("loose", 2 * MIB, seconds)]) for seconds in (1e-3, 4e-3))
    assert "| mlp, 8 | 2.00 (1.41) |" in lines(first, last)


def test_a_case_of_real_size_is_beside_the_best_layout_by_hand():
    task = Task("llama-7b-16", "searched", Compiler("v5e:4x4"), "real", ("loose",))
    found = lines(report(task, [planned("loose", 2 * MIB, 1e-3)]))
    assert "| llama-7b-16 | data 8 | 1 ms | 1 MiB | FSDP | 2 ms | 1 MiB | 0.50 (0.71) |" in found


def test_backbones_of_keras_hub_have_memory_and_sent_bytes_beside_layouts_by_hand():
    nothing = PlanScore("half", MIB // 2, 1.0, reason="no layout fits", refused=True)
    found = lines(report(Task("BertBackbone", "8", suite="keras"), [planned("loose", 2 * MIB, 1e-3), nothing]))
    head = "model, mesh (÷ data parallel, FSDP, Keras Hub's map)"
    assert f"| {head} | loose: memory | loose: sent | half: memory | half: sent |" in found
    assert "| BertBackbone, 8 | 1 MiB: –, 1.00, – | –, 1.00, – | refused | refused |" in found


def test_backbones_of_keras_hub_are_ordered_and_have_medians():
    def of(model: str, mesh: str, seconds: float, limit: str = "loose") -> dict:
        return report(Task(model, mesh, suite="keras"), [planned(limit, 2 * MIB, seconds)])

    later = [of("ViTBackbone", "8", 4e-3), of("BertBackbone", "2x4", 1e-3, "tight"), of("BertBackbone", "2x4", 1e-3)]
    found = lines(*later, of("BertBackbone", "8", 1e-3))
    rows = [line.split(" |")[0] for line in found if "MiB:" in line]
    assert rows == ["| BertBackbone, 8", "| BertBackbone, 2x4", "| ViTBackbone, 8"]
    assert "| loose | 3 | 0 | 2 of 3 | 0.50 | –, 1.00, – | –, 1.00, – |" in found
    assert "| tight | 1 | 0 | 1 of 1 | 0.50 | –, 1.00, – | –, 1.00, – |" in found
