from __future__ import annotations

import pytest

from penstock.bench.harness import Harness, round_order
from penstock.bench.model import Failure, Outcome
from penstock.bench.suites import workloads


def _run(suite: str, workload: str, rounds: int = 1, size: str = "full") -> Outcome:
    return Harness(suite, size, rounds, seed=1).run(workloads(suite)[workload])


def test_every_variant_runs_in_every_round_in_the_recorded_order(suite):
    outcome = _run(suite, "plain", rounds=3)
    ran = [[s.variant for s in outcome.samples if s.round == number] for number in range(3)]
    assert ran == [round_order(["one", "three"], 1, "plain", number) for number in range(3)]
    assert [s.position for s in outcome.samples] == [0, 1] * 3
    assert {s.variant: s.values["speed"] for s in outcome.samples} == {"one": 1.0, "three": 3.0}


def test_each_sample_comes_from_a_process_of_its_own(suite):
    outcome = _run(suite, "marks", rounds=2)
    assert len({s.details["pid"] for s in outcome.samples}) == 4


def test_variants_get_the_size_that_was_asked_for(suite):
    outcome = _run(suite, "plain", size="quick")
    assert {s.variant: s.values["speed"] for s in outcome.samples} == {"one": 0.5, "three": 1.5}


def test_order_depends_on_seed_and_round_and_is_reproducible():
    names = list("abcdefgh")
    orders = [round_order(names, seed, "w", number) for seed in (1, 2) for number in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0] == round_order(names, 1, "w", 0)
    assert all(sorted(order) == names for order in orders)


def test_variant_without_its_library_is_skipped_and_named(suite):
    outcome = _run(suite, "missing")
    (missing,) = outcome.missing
    assert missing.variant == "absent"
    assert missing.packages == ("no_such_module_of_ours", "tensorflow_of_ours")
    assert [s.variant for s in outcome.samples] == ["one"]
    assert not outcome.failures


def test_failing_variants_are_reported_and_the_others_measured(suite):
    outcome = _run(suite, "failing")
    failures = {failure.variant: failure for failure in outcome.failures}
    assert failures["crash"].reason == "RuntimeError: no such luck"
    assert "about to crash" in failures["crash"].output
    assert "Traceback" in failures["crash"].output
    assert failures["wrong"].reason == "VerificationError: record 3 comes 2 times"
    assert failures["exits"].reason == "ended with status 7"
    assert failures["silent"].reason == "ended without a measurement of every metric"
    assert [s.variant for s in outcome.samples] == ["one"]


def test_variant_that_takes_too_long_is_ended(suite):
    outcome = _run(suite, "hanging")
    (failure,) = outcome.failures
    assert failure.reason == "took more than its 6 s"
    assert failure.output == "hanging"


@pytest.mark.slow
def test_variant_that_failed_is_not_run_again(suite):
    outcome = _run(suite, "flaky", rounds=3)
    assert [(failure.variant, failure.round) for failure in outcome.failures] == [("flaky", 1)]
    assert isinstance(outcome.failures[0], Failure)
    assert [s.round for s in outcome.samples if s.variant == "flaky"] == [0]
    assert [s.round for s in outcome.samples if s.variant == "one"] == [0, 1, 2]
