from __future__ import annotations

import io
import json
from dataclasses import dataclass

import pytest
from rich.console import Console

from penstock.bench import machine, report
from penstock.bench.model import Failure, Measurement, Metric, Missing, Outcome, Run, Sample, Target, Variant, Workload


@dataclass(frozen=True)
class _Size:
    records: int = 7_000


def _run(size="full", **outcome) -> Run:
    variants = tuple(
        Variant(name, lambda size: Measurement({}), note=note)
        for name, note in [("a", ""), ("b", "a note of {records:,}"), ("c", "")]
    )
    workload = Workload(
        "pace",
        "{records:,} records",
        (Metric("m", "ms", "lower", ideal=2.0),),
        "a",
        variants,
        {"full": _Size(), "quick": _Size(12)},
        targets=(Target("b", "m", 0.5, "a"), Target("b", "m", 1.0), Target("c", "m", 1.0)),
    )
    samples = tuple(Sample(name, 0, 0, 1.0, {"m": value}, {"device": "cpu: cpu"}) for name, value in [("a", 10.0), ("b", 4.0)])
    return Run("feed", size, 1, 99, machine.describe(), (Outcome(workload, size, samples, **outcome),))


def _printed(run: Run) -> str:
    console = Console(file=io.StringIO(), width=200)
    for outcome in run.outcomes:
        report.print_outcome(console, outcome)
    report.print_closing(console, run)
    return console.file.getvalue()


def _both(run: Run) -> list[str]:
    return [_printed(run), report.as_markdown(run)]


def test_tables_have_medians_ratios_notes_and_targets():
    for text in _both(_run()):
        for expected in (
            "vs a",
            "vs ideal 2 ms",
            "0.4000×",
            "2.000×",
            "7,000 records",
            "b: a note of 7,000",
            "target: b at most 0.5× a: 0.4000×, met",
            "target: b at most 1 ms: 4.000 ms, NOT MET",
            "target: c at most 1 ms: not judged: no measurement",
            "order (seed 99)",
        ):
            assert expected in text


def test_machine_is_named():
    run = _run()
    for text in _both(run):
        assert run.machine["cpu"] in text
        assert f"jax {run.machine['versions']['jax']}" in text
        assert run.machine["date"] in text
        assert "cpu: cpu" in text


def test_missing_and_failed_variants_are_told_with_the_way_out_and_the_output():
    failure = Failure("c", 1, "RuntimeError: [bad] luck", "Traceback …\nlast words")
    run = _run(missing=(Missing("b", ("tensorflow-cpu", "torch")),), failures=(failure,))
    for text in _both(run):
        assert "b: not installed: pip install tensorflow-cpu torch" in text
        assert "c: left out, it failed in round 2: RuntimeError: [bad] luck" in text
        assert "last words" in text


def test_long_output_is_cut_and_says_so():
    run = _run(failures=(Failure("c", 0, "crashed", "\n".join(f"line {i}" for i in range(100))),))
    for text in _both(run):
        assert "… 60 lines before …" in text
        assert "line 99" in text
        assert "line 59\n" not in text


@pytest.mark.parametrize("size", ["full", "quick"])
def test_quick_sizes_are_called_no_measurement_of_speed(size):
    for text in _both(_run(size)):
        assert ("not how fast it is" in text) == (size == "quick")


def test_quick_sizes_are_those_in_titles_and_notes_and_judge_no_target():
    run = _run("quick")
    for text in _both(run):
        assert "12 records" in text
        assert "b: a note of 12" in text
        assert "7,000" not in text
        assert text.count("not judged: quick sizes") == 2
        assert "NOT MET" not in text
    (workload,) = json.loads(report.as_json(run))["workloads"]
    assert (workload["title"], workload["notes"]["b"]) == ("12 records", "a note of 12")
    assert [target["met"] for target in workload["targets"]] == [None, None, None]


def test_json_has_the_samples_and_what_was_made_of_them():
    loaded = json.loads(report.as_json(_run()))
    assert (loaded["suite"], loaded["rounds"], loaded["order_seed"]) == ("feed", 1, 99)
    assert {"cpu", "cores", "memory_bytes", "python", "versions", "platform", "date", "load_average", "commit"} <= set(
        loaded["machine"]
    )
    (workload,) = loaded["workloads"]
    assert workload["sizes"] == {"records": 7_000}
    assert [sample["values"]["m"] for sample in workload["samples"]] == [10.0, 4.0]
    assert [row["ratio"] for row in workload["metrics"][0]["rows"]] == [1.0, 0.4]
    assert [target["met"] for target in workload["targets"]] == [True, False, None]


def test_markdown_tables_have_equal_columns():
    table = [line for line in report.as_markdown(_run()).splitlines() if line.startswith("|")]
    assert len(table) == 4
    assert len({line.count("|") for line in table}) == 1
