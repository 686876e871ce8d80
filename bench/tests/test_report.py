from __future__ import annotations

import io
import json
from dataclasses import dataclass, replace

import pytest
from rich.console import Console

from penstock_bench import machine, report
from penstock_bench.json_report import as_document, as_json
from penstock_bench.model import Agreement, Measurement, Metric, Target, Variant, Workload
from penstock_bench.outcome import Failure, Missing, Outcome, Parity, Run, Sample

_VALUES = {"a": [10.0, 10.1, 9.9, 10.0, 10.2, 9.8], "b": [4.0, 4.1, 4.0, 3.9, 4.05, 3.95], "c": []}
_AGAIN = [10.1, 10.0, 10.0, 9.9, 10.1, 9.9]


@dataclass(frozen=True)
class _Size:
    records: int = 7_000


def _run(size="full", rounds=6, again=tuple(_AGAIN), partial=None, **changed) -> Run:
    variants = tuple(
        Variant(name, lambda size: Measurement(), note=note)
        for name, note in [("a", ""), ("b", "a note of {records:,}"), ("c", "")]
    )
    workload = Workload(
        "pace",
        "{records:,} records",
        (Metric("m", "ms", "lower", ideal=2.0),),
        "a",
        variants,
        {"full": _Size(), "quick": _Size(12)},
        targets=(Target("b", "m", 0.5, "a"), Target("b", "m", 0.4, "a"), Target("b", "m", 1.0), Target("c", "m", 1.0)),
        agreement=Agreement("x", Variant("float64", lambda size: Measurement()), {"logits": 1e-4}),
    )
    details = {"device": "cpu: cpu"}
    samples = [
        Sample(name, twice, number, 0, 0.0, 1.0, 0.5, {"m": value}, {"m": [value] * 3}, details)
        for name, twice, values in [*((n, False, v) for n, v in _VALUES.items()), ("a", True, again)]
        for number, value in enumerate(values[:rounds])
    ]
    parity = (Parity("a", "logits", 1e-6, 1e-4, "logits"), Parity("c", "logits", float("inf"), 1e-4, "logits"))
    outcome = replace(Outcome(workload, size, "a", tuple(samples), parity=parity), **changed)
    return Run("feed", size, 99, machine.describe(), (outcome,), 90.0, partial)


def _printed(run: Run) -> str:
    console = Console(file=io.StringIO(), width=220)
    report.print_report(console, run)
    return console.file.getvalue()


def _both(run: Run) -> list[str]:
    return [_printed(run), report.as_markdown(run)]


def test_a_report_has_medians_ratios_intervals_notes_targets_parity_and_the_machine():
    run = _run()
    for text in _both(run):
        for expected in (
            "vs a",
            "vs ideal 2 ms",
            "0.4010×",
            "7,000 records",
            "b: a note of 7,000",
            "target: b at most 0.5× a: 0.4010×, met",
            "not judged: its interval holds the bound",
            "target: b at most 1 ms: 4.000 ms, NOT MET",
            "target: c at most 1 ms: not judged: no measurement",
            "seed 99",
            run.machine["cpu"],
            f"jax {run.machine['versions']['jax']}",
            run.machine["date"],
            "cpu: cpu",
            "load average before the runs 0.50 to 0.50",
        ):
            assert expected in text
        assert text.index("A/A control passed") < text.index("vs a")
        assert "relative difference from float64" in " ".join(text.split())
        assert "1e-06" in text
        assert "NO" in text
        line = next(line for line in text.splitlines() if "b takes" in line)
        assert "b takes 0.4010× the ms of a (95 %: 0.3918× to 0.4055×;" in line
        assert "corrected p < 0.0001" in line
        assert "b is better" in line


def test_control_that_fails_is_said_first_and_nothing_is_claimed():
    for text in _both(_run(again=[2 * value for value in _AGAIN])):
        assert text.index("A/A CONTROL FAILED: this report claims nothing") < text.index("vs a")
        assert "different" not in text
        assert "beyond chance" not in text
        assert "0.4010×, not judged: the A/A control failed" in text


def test_few_rounds_claim_nothing_and_say_why():
    for text in _both(_run(rounds=3)):
        assert "No A/A control could be judged (that takes 6 rounds), so nothing is claimed" in text
        assert "3 rounds, and fewer than 6 are not judged" in text
        assert "0.4010×, met" not in text
        assert "NOT MET" not in text


def test_partial_report_says_so_at_the_top():
    for text in _both(_run(partial="interrupted in round 7")):
        assert text.index("PARTIAL: interrupted in round 7") < text.index("vs a")


def test_clocks_flags_and_gpus_are_recorded(monkeypatch):
    run = _run()
    assert {"clocks", "gpus", "load_average", "commit"} <= set(run.machine)
    monkeypatch.setenv("XLA_FLAGS", "--xla_some_flag=1")
    monkeypatch.setenv("NVIDIA_API_KEY", "hush")
    flags = machine.flags()
    assert flags["XLA_FLAGS"] == "--xla_some_flag=1"
    assert "NVIDIA_API_KEY" not in flags
    known = {"flags": flags, "gpus": ["NVIDIA H200, 1"], "clocks": "2000 to 2100 MHz, governor x", "huge_pages": "always"}
    run = replace(run, machine={**run.machine, **known})
    for text in _both(run):
        for expected in ("XLA_FLAGS=--xla_some_flag=1", "GPU: NVIDIA H200, 1", "2000 to 2100 MHz", "huge pages: always"):
            assert expected in text


def test_missing_and_failed_variants_are_told_with_the_way_out_and_the_output():
    failures = (
        Failure("c", 1, "RuntimeError: [bad] luck", "Traceback …\nlast words"),
        Failure("d", None, "not timed: it computes something else", ""),
    )
    run = _run(missing=(Missing("b", "not installed", "pip install tensorflow torch"), Missing("e", "no GPU")), failures=failures)
    for text in _both(run):
        assert "b: not installed: pip install tensorflow torch" in text
        assert "e: no GPU\n" in text
        assert "c: left out, it failed in round 2: RuntimeError: [bad] luck" in text
        assert "d: left out, it failed before the first round: not timed" in text
        assert "last words" in text


def test_output_cannot_end_its_block_nor_a_name_its_cell():
    run = _run(failures=(Failure("c|d", 0, "crashed", "```\n# not a heading"),))
    markdown = report.as_markdown(run)
    assert "````text\nc|d wrote:\n```\n# not a heading\n````" in markdown


def test_missing_baseline_is_told():
    (outcome,) = (run := _run()).outcomes
    alone = replace(outcome, samples=tuple(s for s in outcome.samples if s.variant == "b"))
    for text in _both(replace(run, outcomes=(alone,))):
        assert "nothing is compared: a, the baseline, did not run" in text


def test_long_output_is_cut_and_says_so():
    run = _run(failures=(Failure("c", 0, "crashed", "\n".join(f"line {i}" for i in range(100))),))
    for text in _both(run):
        assert "… 60 lines before …" in text
        assert "line 99" in text
        assert "line 59\n" not in text


def test_quick_sizes_are_those_in_titles_and_notes_and_judge_no_target():
    run = _run("quick")
    for text in _both(run):
        assert "not how fast it is" in text
        assert "12 records" in text
        assert "b: a note of 12" in text
        assert "7,000" not in text
        assert text.count("not judged: quick sizes") == 3
        assert "NOT MET" not in text
    (workload,) = as_document(run)["workloads"]
    assert (workload["title"], workload["notes"]["b"]) == ("12 records", "a note of 12")
    assert [target["met"] for target in workload["targets"]] == [None] * 4


def test_document_has_the_samples_and_what_was_made_of_them():
    document = as_document(_run(partial="cut"))
    assert (document["suite"], document["order_seed"], document["partial"]) == ("feed", 99, "cut")
    assert document["verdict"]["trusted"] is True
    (workload,) = document["workloads"]
    assert workload["sizes"] == {"records": 7_000}
    assert [sample["values"]["m"] for sample in workload["samples"]][:6] == _VALUES["a"]
    assert workload["samples"][0]["steps"] == {"m": [10.0] * 3}
    assert [(c["variant"], c["control"], c["verdict"]) for c in workload["comparisons"]] == [
        ("a", True, "not shown"),
        ("b", False, "different"),
    ]
    assert [target["met"] for target in workload["targets"]] == [True, None, False, None]
    assert [(row["difference"], row["agreed"]) for row in workload["parity"]] == [(1e-6, True), (None, False)]


def test_json_is_the_document_with_a_list_of_numbers_on_a_line():
    document = as_document(_run(failures=(Failure("c", 0, "said [\n1,\n 2]", "[\n3\n]"),)))
    text = as_json(document)
    assert json.loads(text) == json.loads(json.dumps(document))
    assert '"m": [ 10.0, 10.0, 10.0 ]' in text


def test_markdown_tables_have_equal_columns():
    tables = [block.splitlines() for block in report.as_markdown(_run()).split("\n\n") if block.startswith("|")]
    assert len(tables) == 2
    assert all(len({line.count("|") for line in table}) == 1 for table in tables)


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        ([], "known faults of jaxlib: unknown"),
        (["right", "right"], "known faults of jaxlib: none, all 2"),
        (["right", "wrong", "crash"], "case 1: wrong (https://example.org/1); case 2: crash (https://example.org/2)"),
    ],
)
def test_known_faults_of_jaxlib_are_recorded(verdicts, said):
    found = [{"name": f"case {n}", "link": f"https://example.org/{n}", "verdict": each} for n, each in enumerate(verdicts)]
    run = _run()
    for text in _both(replace(run, machine={**run.machine, "known_cases": found})):
        assert said in " ".join(text.split())
