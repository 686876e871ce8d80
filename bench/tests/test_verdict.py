from __future__ import annotations

from dataclasses import replace

import pytest
from bench.tests import simulation

from penstock_bench.model import Target
from penstock_bench.outcome import Failure, Outcome, Run, Sample
from penstock_bench.verdict import judge, rows


def _run(values: dict[str, list[float]], targets: tuple[Target, ...] = (), size="full", **changed) -> Run:
    """Variants with these numbers, in this order of rounds; the first is the baseline, and its twin is one part in 1,000 off."""
    workload = simulation.workload(*values, targets=targets)
    control = next(iter(values))
    samples = [
        Sample(name, again, number, 0, 0.0, 1.0, None, {"m0": value * (1 + again * 1e-3 * (-1) ** number)}, {}, {})
        for name, numbers in values.items()
        for number, value in enumerate(numbers)
        for again in ([False, True] if name == control else [False])
    ]
    outcome = replace(Outcome(workload, size, control, tuple(samples)), **changed)
    return Run("s", size, 1, simulation.MACHINE, (outcome,), 1.0)


_NOISE = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99]


def _times(factor: float) -> list[float]:
    return [factor * noise * (1 + 1e-3 * (-1) ** (number // 2)) for number, noise in enumerate(_NOISE)]


def test_rows_have_the_median_and_the_range_of_runs_in_the_order_of_the_workload():
    run = _run({"a": [1.0, 3.0, 2.0], "b": [5.0, 4.0, 9.0]})
    (outcome,) = run.outcomes
    found = rows(outcome, outcome.workload.metrics[0])
    assert [(row.variant, row.runs, row.median, row.low, row.high) for row in found] == [
        ("a", 3, 2.0, 1.0, 3.0),
        ("b", 3, 5.0, 4.0, 9.0),
    ]


def test_variants_are_compared_with_the_baseline_and_where_a_target_asks_for_it():
    run = _run({"a": _NOISE, "b": _times(2), "c": _times(3)}, targets=(Target("c", "m0", 1.4, "b"), Target("b", "m0", 2.5)))
    judgement = judge(run)
    (claims,), (verdicts,) = judgement.claims, judgement.verdicts
    assert judgement.trusted is True
    assert [(c.variant, c.baseline, c.control) for c in claims] == [
        ("a", "a", True),
        ("b", "a", False),
        ("c", "a", False),
        ("c", "b", False),
    ]
    assert [round(c.comparison.ratio, 1) for c in claims] == [1.0, 2.0, 3.0, 1.5]
    assert [c.call for c in claims] == ["not shown", *["different"] * 3]
    assert [v.met for v in verdicts] == [False, True]
    assert verdicts[0].reached == pytest.approx(1.5, rel=1e-2)


def test_targets_are_judged_only_of_enough_rounds_beside_a_control():
    targets = (Target("b", "m0", 1.5, "a"), Target("b", "m0", 2.5))
    values = {"a": _NOISE, "b": _times(2)}
    (enough,) = judge(run := _run(values, targets)).verdicts
    assert [verdict.met for verdict in enough] == [False, True]
    (few,) = judge(_run({name: numbers[:5] for name, numbers in values.items()}, targets)).verdicts
    assert [(verdict.met, verdict.why_not) for verdict in few] == [(None, "no A/A control")] * 2
    (outcome,) = run.outcomes
    alone = replace(outcome, samples=tuple(sample for sample in outcome.samples if not sample.again))
    both = judge(replace(run, outcomes=(outcome, alone))).verdicts
    assert [[verdict.met for verdict in verdicts] for verdicts in both] == [[False, True], [None, None]]


def test_p_values_are_corrected_for_all_comparisons_of_the_report():
    one, three = (judge(_run({"a": _NOISE, **{n: _times(1.001) for n in names}})) for names in ["b", "bcd"])
    plain, corrected = one.claims[0][1], three.claims[0][1]
    assert plain.p_corrected == plain.comparison.p == corrected.comparison.p
    assert corrected.p_corrected == pytest.approx(min(1, 3 * corrected.comparison.p))


def test_fewer_than_six_rounds_are_not_judged():
    judgement = judge(_run({"a": _NOISE[:5], "b": _times(2)[:5]}))
    assert judgement.trusted is None
    assert [claim.call for claim in judgement.claims[0]] == ["not judged"] * 2
    assert judgement.claims[0][1].comparison.ratio == pytest.approx(2, rel=1e-2)


def test_quick_sizes_judge_nothing():
    judgement = judge(_run({"a": _NOISE, "b": _times(2)}, targets=(Target("b", "m0", 9),), size="quick"))
    assert judgement.trusted is None
    assert {claim.call for claim in judgement.claims[0]} == {"not judged"}
    assert judgement.verdicts[0][0].met is None


def test_nothing_is_claimed_where_no_control_ran():
    run = _run({"a": _NOISE, "b": _times(2)})
    (outcome,) = run.outcomes
    alone = replace(outcome, samples=tuple(s for s in outcome.samples if not s.again))
    judgement = judge(replace(run, outcomes=(alone,)))
    assert judgement.trusted is None
    assert [claim.call for claim in judgement.claims[0]] == ["not judged"]


def test_variant_that_failed_has_no_row_and_no_comparison():
    run = _run({"a": _NOISE, "b": _times(2)}, targets=(Target("b", "m0", 1),), failures=(Failure("b", 3, "died", ""),))
    (outcome,) = run.outcomes
    judgement = judge(run)
    assert [row.variant for row in rows(outcome, outcome.workload.metrics[0])] == ["a"]
    assert [claim.control for claim in judgement.claims[0]] == [True]
    assert (judgement.verdicts[0][0].reached, judgement.verdicts[0][0].met) == (None, None)


def test_only_rounds_that_both_have_are_compared():
    run = _run({"a": _NOISE, "b": _times(2)})
    (outcome,) = run.outcomes
    fewer = replace(outcome, samples=tuple(s for s in outcome.samples if s.variant == "a" or s.round != 3))
    assert judge(replace(run, outcomes=(fewer,))).claims[0][1].comparison.pairs == 7
