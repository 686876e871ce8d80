from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from penstock_bench import command, measurement
from penstock_bench.budget import Budget, that_fit_in_time, too_late
from penstock_bench.outcome import Block, Missing, Outcome, Run, Sample
from penstock_bench.rounds import Harness
from penstock_bench.suites import SUITES, find, load


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
    assert all(suite in error for suite in [*SUITES, "all"])


def test_unknown_workload_lists_the_choices(capsys):
    with pytest.raises(SystemExit) as exited:
        _args("feed", "--only", "nonsense")
    assert exited.value.code == 2
    error = capsys.readouterr().err
    assert "'nonsense'" in error
    assert all(workload.name in error for workload in load("feed").WORKLOADS)


def test_unknown_variant_lists_the_choices(capsys):
    assert command.run(_args("feed", "--only", "overlap", "--variant", "nonsense")) == 2
    error = capsys.readouterr().err
    assert "--variant nonsense: none of these workloads has it; choose from none, grain C, penstock" in error


def test_help_of_a_suite_lists_its_workloads_with_their_titles(capsys):
    with pytest.raises(SystemExit):
        _args("feed", "--help")
    printed = " ".join(capsys.readouterr().out.split())
    for workload in load("feed").WORKLOADS:
        assert f"{workload.name} {workload.fill(workload.title, 'full')}" in printed


@pytest.mark.parametrize("title", ["{rows} rows", "{} rows", "{n.rows}", "{n", "{n:rows}"])
def test_a_title_or_a_note_with_a_field_that_a_size_has_not_is_refused(title):
    workload = load("feed").WORKLOADS[0]
    sizes = dict.fromkeys(("full", "quick"), SimpleNamespace(n=3))
    noted = replace(workload.variants[0], note=title)
    for change in ({"title": title, "variants": ()}, {"title": "{n} rows", "variants": (noted,)}):
        with pytest.raises(ValueError, match=r"has a name in braces .* use \{n\}"):
            replace(workload, sizes=sizes, **change)
    assert replace(workload, title="{n} {{rows}}", sizes=sizes, variants=()).fill("{n} {{rows}}", "full") == "3 {rows}"


def test_grain_is_measured_with_its_default_threads_and_with_none():
    for name in ("images", "tokens", "overhead"):
        workload = find(SUITES["feed"], name)
        assert "16 threads" in workload.variant("grain C").note
        assert "num_threads=0" in workload.variant("grain C, 0 threads").note
        assert {target.relative_to for target in workload.targets} <= {"grain C", "NumPy loop"}


@pytest.mark.parametrize(
    ("flag", "value", "needs"),
    [
        *[("--rounds", value, "needs an integer >= 1") for value in ("0", "1.5")],
        *[("--minutes", value, "needs a number > 0") for value in ("0", "nan", "inf")],
        *[("--until-precise", value, "needs a share such as 1%") for value in ("0", "100%", "nan")],
    ],
)
def test_budgets_must_be_usable(flag, value, needs, capsys):
    with pytest.raises(SystemExit):
        _args("feed", flag, value)
    assert f"{flag}: {value}: {needs}" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "share"), [("1%", 0.01), ("0.5 %", 0.005), ("0.02", 0.02)])
def test_precision_is_a_share(text, share):
    assert _args("feed", "--until-precise", text).until_precise == pytest.approx(share)


def _run_fake(tmp_path, *arguments: str) -> tuple[int, dict]:
    path = tmp_path / "out.json"
    status = command.run(_args("fake", *arguments, "--json", str(path)))
    return status, json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("workload", "status"), [("plain", 0), ("missing", 0), ("failing", 1)])
def test_status_is_1_only_where_a_variant_failed(suite, workload, status, tmp_path, capsys):
    pages = tmp_path / "out.md", tmp_path / "out.html"
    files = ["--markdown", str(pages[0]), "--html", str(pages[1])]
    found, document = _run_fake(tmp_path, "--quick", "--only", workload, *files)
    assert found == status
    assert "one" in capsys.readouterr().out
    assert [outcome["name"] for outcome in document["workloads"]] == [workload]
    assert (document["size"], document["partial"]) == ("quick", None)
    assert f"## {workload}" in pages[0].read_text()
    assert workload in pages[1].read_text()
    assert sorted(path.name for path in tmp_path.iterdir() if "part" in path.name) == []


def test_a_run_that_measures_nothing_has_status_1_and_says_why(suite, tmp_path, capsys):
    for workload, variant, words in (
        ("missing", "absent", "needs pip install no_such_module_of_ours tensorflow_of_ours"),
        ("missing", "elsewhere", "this==1"),
        ("unsuited", "two", "it has no wings"),
    ):
        status, document = _run_fake(tmp_path, "--quick", "--only", workload, "--variant", variant)
        assert (status, document["workloads"][0]["samples"]) == (1, [])
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("penstock bench fake: error: nothing was measured: ")
        assert words in error


@pytest.mark.parametrize(
    ("name", "extra"), [("keras", "suites"), ("frameworks", "suites"), ("shard", "outside"), ("all", "suites")]
)
def test_a_suite_without_its_libraries_names_its_extra(name, extra):
    lacking = tuple(Missing(variant, "not installed", f"pip install {variant}") for variant in ("keras", "flax"))
    outcome = Outcome(load("feed").WORKLOADS[0], "quick", None, (), missing=lacking)
    why = measurement.why_nothing(Run(name, "quick", 0, {}, (outcome,), 0.0))
    assert "needs pip install keras; needs pip install flax" in why
    assert f'"bench[{extra}]"' in why


def test_scored_workload_has_one_round_no_control_and_targets_over_its_parts(suite, tmp_path, capsys):
    pages = tmp_path / "out.md", tmp_path / "out.html"
    files = ["--markdown", str(pages[0]), "--html", str(pages[1])]
    status, document = _run_fake(tmp_path, "--rounds", "3", "--only", "scored", *files)
    assert status == 1  # a part failed
    (outcome,) = document["workloads"]
    assert [sample["variant"] for sample in outcome["samples"]] == [
        f"bird {part}" for part in ("fast", "slow", "still", "broken")
    ]
    assert outcome["control"] is None
    assert [target["met"] for target in outcome["targets"]] == [False, False, True, True]
    assert outcome["targets"][0]["misses"] == ["bird broken: it fell over", "bird slow: 1.000 m/s"]
    assert "not counted: 1, nothing moves" in outcome["targets"][0]["text"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "Counted." in printed
    assert "Scores are counted, not timed" in printed
    assert "| wing | 2 |" in pages[0].read_text()
    page = pages[1].read_text()
    assert "A/A control, a variant" not in page
    assert "bird still: &lt;b&gt;" in page
    assert "it fell over" in page


@pytest.mark.slow
def test_rounds_are_added_until_the_intervals_are_narrow(suite, tmp_path):
    _, document = _run_fake(tmp_path, "--until-precise", "1.4%", "--only", "plain", "--only", "noisy")
    plain, noisy = document["workloads"]
    assert {sample["round"] for sample in plain["samples"]} == set(range(6))  # they do not vary at all
    assert len({sample["round"] for sample in noisy["samples"]}) > 6
    (claim,) = [claim for claim in noisy["comparisons"] if not claim["control"]]
    assert math.sqrt(claim["high"] / claim["low"]) <= 1.014
    assert document["partial"] is None


def test_no_round_is_begun_that_would_end_too_late(suite, tmp_path):
    _, document = _run_fake(tmp_path, "--rounds", "9", "--minutes", "0.0001", "--only", "plain")
    assert document["partial"] == (
        "its 0.0001 minutes ended before one round; allow more (--minutes), so that each variant can run at least once"
    )
    assert document["workloads"][0]["samples"] == []
    _, document = _run_fake(tmp_path, "--until-precise", "1%", "--minutes", "0.0001", "--only", "plain")
    assert "before every interval was within ±1 %" in document["partial"]


@pytest.mark.slow
def test_a_report_is_partial_where_only_the_slow_workload_missed_a_round(suite, tmp_path, monkeypatch):
    def without_noisy(run: Run, wanted: list[str], seconds: float) -> list[str]:
        return [name for name in wanted if name == "plain" or not run.outcomes[1].samples]

    monkeypatch.setattr(measurement, "that_fit_in_time", without_noisy)
    _, document = _run_fake(tmp_path, "--rounds", "2", "--minutes", "5", "--only", "plain", "--only", "noisy")
    assert [{sample["round"] for sample in workload["samples"]} for workload in document["workloads"]] == [{0, 1}, {0}]
    assert document["partial"].startswith("its 5 minutes ended after 1 of 2 rounds; to be judged, it needs about")


def test_no_two_reports_go_to_one_file(suite, tmp_path, capsys):
    path = tmp_path / "out.json"
    assert command.run(_args("fake", "--quick", "--json", str(path), "--html", str(tmp_path / "." / "out.json"))) == 2
    assert "is the file of --json; name another file" in capsys.readouterr().err


def test_the_first_round_of_a_slow_workload_which_compiles_is_not_what_the_next_is_expected_to_take(suite):
    workload = find(suite, "plain")

    def seconds_of_rounds(*seconds: float) -> Run:
        samples = [Sample("one", False, number, 0, 0.0, took, None, {}, {}, {}) for number, took in enumerate(seconds)]
        return Run("fake", "full", 0, {}, (Outcome(workload, "full", "one", tuple(samples)),), sum(seconds))

    assert that_fit_in_time(seconds_of_rounds(260.0), ["plain"], 250.0) == []
    assert that_fit_in_time(seconds_of_rounds(260.0, 200.0, 210.0, 205.0), ["plain"], 206.0) == ["plain"]
    assert that_fit_in_time(seconds_of_rounds(260.0, 200.0, 210.0, 205.0), ["plain"], 204.0) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "by", "when", "samples"),
    [
        ("waiting", signal.SIGTERM, "in round 1", 3),
        ("starting", signal.SIGINT, "in round 1", 3),
        ("comparing", signal.SIGTERM, "before the first round", 0),
    ],
)
def test_what_ends_the_process_ends_its_worker_and_keeps_what_was_measured(suite, tmp_path, workload, when, samples, by):
    path, pid = tmp_path / "out.json", tmp_path / "hanging.pid"
    code = (
        "import sys, argparse, signal; from penstock_bench import command; from penstock_bench.suites import SUITES;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # which a shell's background job ignores
        f"SUITES['fake'] = {suite!r}; parser = argparse.ArgumentParser(); command.add_arguments(parser);"
        "sys.exit(command.run(parser.parse_args(sys.argv[1:])))"
    )
    arguments = ["fake", "--only", "plain", "--only", workload, "--rounds", "1", "--json", str(path)]
    environment = {**os.environ, "WAITING": str(pid), "COMPUTED": str(tmp_path / "computed")}
    os.mkfifo(pid)
    bench = subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, stdout=subprocess.DEVNULL)
    worker = int(pid.read_text())  # which comes when the worker is there
    bench.send_signal(by)
    assert bench.wait(60) == 130
    document = json.loads(path.read_text())
    assert document["partial"] == f"interrupted {when}"
    assert len(document["workloads"][0]["samples"]) == samples
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


@pytest.mark.parametrize("flag", ["--json", "--html"])
def test_file_that_cannot_be_written_is_told_before_anything_is_measured(flag, tmp_path, capsys):
    path = tmp_path / "no folder" / "out"
    assert command.run(_args("feed", flag, str(path))) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{flag} {path}: cannot be written (No such file or directory)" in printed.err


def test_interrupted_run_keeps_what_was_measured_and_says_that_it_is_partial(suite, tmp_path, capsys):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
    try:
        only = ["--only", "plain", "--only", "interrupting", "--variant", "three", "--variant", "interrupt"]
        status, document = _run_fake(tmp_path, "--quick", *only)
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == 130
    assert document["partial"] == "interrupted in round 1"
    plain, _ = document["workloads"]
    assert len(plain["samples"]) == 1
    assert "PARTIAL: interrupted in round 1" in capsys.readouterr().out


def test_file_of_a_run_that_is_killed_says_that_it_is_not_finished(suite, tmp_path, monkeypatch):
    """Read the file on disk during a round, so that the way in which the process ends does not matter."""
    path = tmp_path / "out.json"
    seen = []

    def look(harness, number, only, turns, until, share):
        seen.append(json.loads(path.read_text())["partial"])

    monkeypatch.setattr(Harness, "round", look)
    assert command.run(_args("fake", "--only", "plain", "--rounds", "2", "--json", str(path))) == 1  # nothing was measured
    assert seen == ["not finished, rounds done: 0", "not finished, rounds done: 1"]
    assert json.loads(path.read_text())["partial"] is None


def test_all_suites_make_one_report_of_the_variants_that_were_asked_for(suite, tmp_path, monkeypatch):
    for name in [name for name in SUITES if name != "fake"]:
        monkeypatch.delitem(SUITES, name)
    path = tmp_path / "out.json"
    assert command.run(_args("all", "--quick", "--only", "plain", "--variant", "three", "--json", str(path))) == 0
    document = json.loads(path.read_text())
    assert document["suite"] == "all"
    assert {sample["variant"] for sample in document["workloads"][0]["samples"]} == {"three"}


def test_feed_suite_runs_and_every_variant_passes_its_verification(tmp_path, capsys):
    """One workload stands for all, which `.ci/run slow` runs."""
    path = tmp_path / "out.json"
    status = command.run(_args("feed", "--quick", "--only", "restore", "--json", str(path)))
    assert status == 0, capsys.readouterr().out
    (outcome,) = json.loads(path.read_text())["workloads"]
    ran = {sample["variant"] for sample in outcome["samples"]} | {missing["variant"] for missing in outcome["missing"]}
    assert ran == set(outcome["notes"])
    assert not any(sample["again"] for sample in outcome["samples"])  # a quick run has no control
    assert all(value >= 0 for sample in outcome["samples"] for value in sample["values"].values())


def test_too_few_rounds_say_how_long_enough_would_take(suite):
    workload = find(suite, "live")
    samples = tuple(Sample("one", False, 0, 0, 0.0, 20.0, None, {"speed": 1.0}, {}, {}) for _ in range(3))
    blocks = tuple(Block("one", False, 0, 0, 0, "speed", 1.0, 0.0, 0.5, None, None, None, None, None) for _ in range(3))
    run = Run("fake", "full", 0, {}, (Outcome(workload, "full", "one", samples, blocks=blocks),), 60.0)
    said = too_late(run, Budget(4, 1.0, None, fills=True))
    assert said == "its 1 minutes ended after 1 rounds; to be judged, it needs about 4.8 minutes or more (--minutes)"
