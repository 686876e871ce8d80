from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from penstock_bench.outcome import Missing, Outcome
from penstock_bench.rounds import Harness, round_order
from penstock_bench.suites import find


def _run(module: str, *workloads: str, rounds: int = 1, size: str = "full", variants=None) -> list[Outcome]:
    with Harness([(module, find(module, name)) for name in workloads], size, seed=1, variants=variants) as harness:
        harness.check_agreement()
        for number in range(rounds):
            harness.round(number)
        return list(harness.outcomes())


def _ran(outcome: Outcome) -> dict[str, list[int]]:
    return {
        name: [s.round for s in outcome.samples if s.variant == name and not s.again]
        for name in {s.variant for s in outcome.samples}
    }


@pytest.mark.slow
def test_every_variant_runs_in_every_round_and_the_control_twice_in_the_recorded_order(suite):
    (outcome,) = _run(suite, "plain", rounds=3)
    runs = [("one", False), ("three", False), ("one", True)]
    ran = [[(s.variant, s.again) for s in outcome.samples if s.round == number] for number in range(3)]
    assert ran == [round_order(runs, 1, "plain", number) for number in range(3)]
    assert [s.position for s in outcome.samples] == [0, 1, 2] * 3
    assert outcome.control == "one"
    assert {s.variant: s.values["speed"] for s in outcome.samples} == {"one": 1.0, "three": 3.0}
    assert outcome.by_round("one", "speed", again=True) == {0: 1.0, 1: 1.0, 2: 1.0}
    starts = [s.started for s in outcome.samples]
    assert starts == sorted(starts)


@pytest.mark.slow
def test_each_sample_comes_from_a_process_of_its_own(suite):
    (outcome,) = _run(suite, "marks", rounds=2)
    assert len({s.details["pid"] for s in outcome.samples}) == 6


def test_quick_sizes_run_once_without_those_that_cannot_and_say_why(suite):
    plain, missing, unsuited, steps = _run(suite, "plain", "missing", "unsuited", "steps", size="quick")
    assert {s.variant: s.values["speed"] for s in plain.samples} == {"one": 0.5, "three": 1.5}
    assert [s.again for s in plain.samples] == [False] * 2
    assert plain.control is None

    absent, elsewhere = missing.missing
    assert (absent.variant, absent.reason) == ("absent", "not installed")
    assert absent.command == "pip install no_such_module_of_ours tensorflow_of_ours"
    assert "no_such_place" in elsewhere.command
    assert elsewhere.command.endswith("-m pip install this==1 that==2")
    assert {s.variant for s in missing.samples} == {"one"}
    assert not missing.failures

    assert unsuited.missing == (Missing("two", "it has no wings"),)
    assert {s.variant for s in unsuited.samples} == {"one"}

    assert {s.values["speed"] for s in steps.samples} == {9.5}  # the median without the edges
    assert len(steps.samples[0].steps["speed"]) == 20
    assert steps.failures[0].reason == "timed no step of speed"


@pytest.mark.slow
def test_rounds_go_over_all_workloads(suite):
    plain, marks = _run(suite, "plain", "marks", rounds=2)
    assert max(s.started for s in marks.samples if s.round == 0) < min(s.started for s in plain.samples if s.round == 1)


def test_only_some_variants_can_be_asked_for(suite):
    (outcome,) = _run(suite, "plain", variants=["three"])
    assert {s.variant for s in outcome.samples} == {"three"}
    assert outcome.control == "three"


def test_order_depends_on_seed_and_round_and_is_reproducible():
    runs = [(name, False) for name in "abcdefgh"]
    orders = [round_order(runs, seed, "w", number) for seed in (1, 2) for number in (0, 2)]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0] == round_order(runs, 1, "w", 0)
    assert all(sorted(order) == runs for order in orders)


def test_every_second_round_is_the_one_before_it_backwards():
    runs = [(name, False) for name in "abcdefgh"]
    assert round_order(runs, 1, "w", 5) == round_order(runs, 1, "w", 4)[::-1]


def test_variant_runs_in_the_interpreter_of_its_environment(suite, tmp_path):
    python = tmp_path / "environments" / "here" / "bin" / "python"
    python.parent.mkdir(parents=True)
    script = f'#!/bin/sh\nFROM_ELSEWHERE=1 exec {sys.executable} "$@"\n'
    python.write_text(script)
    python.chmod(0o755)
    (outcome,) = _run(suite, "here")
    assert [s.details["from"] for s in outcome.samples if s.variant == "two"] == ["1"]
    python.write_text("#!/bin/sh\nexit 3\n")
    (outcome,) = _run(suite, "here")
    assert [missing.variant for missing in outcome.missing] == ["two"]


@pytest.mark.slow
def test_who_runs_is_compared_though_the_baseline_does_not(suite):
    (outcome,) = _run(suite, "plain", variants=["three"])
    assert (outcome.workload.baseline, outcome.control) == ("three", "three")
    (outcome,) = _run(suite, "agreeing", variants=["far", "near", "one"])
    assert outcome.workload.baseline == "one"
    (outcome,) = _run(suite, "failing", variants=["crash", "exits"])
    assert not outcome.samples


def test_failing_variants_are_reported_and_the_others_measured(suite):
    (outcome,) = _run(suite, "failing", size="quick")
    failures = {failure.variant: failure for failure in outcome.failures}
    assert failures["crash"].reason == "RuntimeError: no such luck"
    assert "about to crash" in failures["crash"].output
    assert "Traceback" in failures["crash"].output
    assert failures["wrong"].reason == "VerificationError: record 3 comes 2 times"
    assert failures["exits"].reason == "ended with status 7"
    assert failures["silent"].reason == "ended without a measurement of every metric"
    assert failures["nan"].reason == "measured no number: speed is nan"
    assert failures["quits"].reason == "ended without a measurement of every metric"
    assert failures["quits"].output == "gone without a word"
    assert {s.variant for s in outcome.samples} == {"one"}


def test_variant_that_takes_too_long_is_ended(suite):
    (outcome,) = _run(suite, "hanging")
    (failure,) = outcome.failures
    assert failure.reason == "took more than its 6 s"
    assert failure.output == "hanging"


@pytest.mark.slow
def test_variant_that_failed_is_not_run_again_and_has_no_place_in_the_tables(suite):
    (outcome,) = _run(suite, "flaky", rounds=3)
    assert [(failure.variant, failure.round) for failure in outcome.failures] == [("flaky", 1)]
    assert _ran(outcome) == {"flaky": [0], "one": [0, 1, 2]}
    assert outcome.by_round("flaky", "speed") == {}


def test_variants_that_compute_something_else_are_not_timed(suite):
    (outcome,) = _run(suite, "agreeing", size="quick")
    reasons = {failure.variant: failure.reason for failure in outcome.failures}
    assert {s.variant for s in outcome.samples} - set(reasons) == {"one", "near"}
    assert {"far", "nan", "silent", "crash", "quits"}.isdisjoint(s.variant for s in outcome.samples)
    assert "logits is 0.02 from the one of reference (tolerance 0.001)" in reasons["far"]
    assert "logits is inf" in reasons["nan"]
    assert "logits is inf" in reasons["silent"]
    assert "its outputs cannot be read" in reasons["quits"]  # and the outputs of an earlier process are not used
    assert reasons["crash"] == "computing what is compared: RuntimeError: cannot be computed"
    agreed = {(row.variant, row.quantity): row.agreed for row in outcome.parity}
    assert agreed["near", "logits"]
    assert agreed["far", "loss"]
    assert not agreed["far", "logits"]


@pytest.mark.slow
def test_variant_that_computes_something_else_when_it_is_timed_is_left_out(suite):
    (outcome,) = _run(suite, "agreeing", variants=["one", "near", "liar", "lost"])
    reasons = {failure.variant: failure.reason for failure in outcome.failures}
    assert set(reasons) == {"liar", "lost"}
    assert "computed something else when it was timed: its loss is 1.1, the variants' median 1" in reasons["liar"]
    assert "its loss is nan, the variants' median 1" in reasons["lost"]


@pytest.mark.slow
def test_nobody_is_believed_where_two_compute_different_things(suite):
    (outcome,) = _run(suite, "agreeing", variants=["one", "liar"])
    assert {failure.variant for failure in outcome.failures} == {"one", "liar"}


def test_workloads_that_share_an_agreement_are_checked_once(suite):
    outcomes = _run(suite, "agreeing", "agreeing again", rounds=0, variants=["one", "near"])
    assert [len(outcome.parity) for outcome in outcomes] == [4, 4]
    assert Path(os.environ["COMPUTED"]).read_text() == "..."


def test_nothing_is_timed_without_its_reference(suite):
    (outcome,) = _run(suite, "no reference")
    assert not outcome.samples
    assert outcome.failures[0].reason == "not timed: its reference, reference, failed"
    assert "cannot be computed" in outcome.failures[0].output
