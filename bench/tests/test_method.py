"""The words of a report on how it was measured."""

from __future__ import annotations

import dataclasses

import pytest
from bench.tests.simulation import workload

from penstock_bench.method import method
from penstock_bench.model import Agreement, Variant
from penstock_bench.outcome import Block, Outcome, Run, Sample
from penstock_bench.repetition import Repetition


def block(number: int, turn: int) -> Block:
    return Block("a", False, number, turn, 0, "m0", 1.0, 0.0, 0.5, None, None, None, None, None)


SAMPLE = Sample("a", False, 0, 0, 0.0, 1.0, None, {"m0": 1.0}, {}, {})


def run(*outcomes: Outcome) -> Run:
    return Run("pace", "full", 7, {}, outcomes, 1.0)


def test_live_pairs_say_how_often_they_were_repeated_and_why():
    blocks = tuple(block(number, turn) for number, turns in enumerate((4, 8)) for turn in range(turns))
    plan = Repetition(8, 0.1, 0.02, False, 41.0, 9.4)
    outcome = Outcome(workload("a", "b"), "full", "a", (SAMPLE,), blocks=blocks, repetition=plan)
    first, repeated, verified = method(run(outcome))
    assert first.startswith("Live pairs.")
    assert "seed 7" in first
    assert "1 round of 4 to 8 turns" in repeated
    assert "scatters by 10 % from turn to turn and by 2 % from round to round for good" in repeated
    assert "A start takes 41 s and a turn 9.4 s, so rounds of 8 turns are best" in repeated
    assert "nothing was verified" in verified


@pytest.mark.parametrize(("faults", "named"), [(15_000, True), (1_000, False), (None, False)])
def test_variants_that_get_memory_again_and_again_are_named(faults: int | None, named: bool):
    blocks = [dataclasses.replace(block(0, turn), cpu=1.0, faults=faults) for turn in range(2)]
    quiet = [dataclasses.replace(one, variant="b", faults=0) for one in blocks]
    said = method(run(Outcome(workload("a", "b"), "full", "a", (SAMPLE,), blocks=(*blocks, *quiet))))
    assert any(line.startswith("Page faults in a second of the processor. a: 15 thousand.") for line in said) == named


def test_what_is_verified_is_only_what_the_suite_says():
    plain = workload("a", "b")
    agreement = Agreement("x", Variant("r", lambda size: None), {"logits": 1.0, "loss": 1.0})
    verifying = dataclasses.replace(plain, name="other", agreement=agreement, verifies="finite weights")
    said = method(run(Outcome(plain, "full", "a", (SAMPLE,)), Outcome(verifying, "full", "a", (SAMPLE,))))
    assert "pace: nothing was verified: the variants may do different things." in said
    assert "other: verified, outside of the timed part: equal logits, loss before anything was timed; finite weights." in said


def test_two_designs_in_one_report_are_named():
    live = Outcome(workload("a", "b"), "full", "a", (SAMPLE,), blocks=(block(0, 0),))
    alone = Outcome(dataclasses.replace(workload("a", "b"), name="memory"), "full", "a", (SAMPLE,))
    said = method(run(live, alone))
    assert any(line.startswith("pace: Live pairs.") for line in said)
    assert any(line.startswith("memory: Each variant ran alone in a fresh process") for line in said)


def test_nothing_is_said_of_a_workload_that_was_not_measured():
    assert method(run(Outcome(workload("a", "b"), "full", "a", ()))) == []
