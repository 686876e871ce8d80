from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from penstock.bench.model import Failure, Measurement, Metric, Outcome, Sample, Target, Variant, Workload
from penstock.bench.summary import ratio, rows, verdicts


def _variant(name: str) -> Variant:
    return Variant(name, lambda size: Measurement({}))


def _outcome(better="higher", targets=(), ideal=None, failures=(), size="full", **values: list[float]) -> Outcome:
    metric = Metric("m", "s", better, ideal)
    workload = Workload("w", "t", (metric,), "base", tuple(map(_variant, values)), {"full": SimpleNamespace()}, targets)
    samples = tuple(
        Sample(name, number, 0, 1.0, {"m": value}, {}) for name, series in values.items() for number, value in enumerate(series)
    )
    return Outcome(workload, size, samples, failures)


def test_ratio_is_the_median_of_ratios_within_rounds():
    # The machine was ten times slower in the last round, which leaves that round's ratio alone.
    outcome = _outcome(base=[10.0, 12.0, 1.0], ours=[20.0, 36.0, 4.0])
    assert ratio(outcome, "m", "ours", "base") == 3.0
    base, ours = rows(outcome, outcome.workload.metrics[0])
    assert (ours.median, ours.low, ours.high, ours.ratio) == (20.0, 4.0, 36.0, 3.0)
    assert base.ratio == 1.0


def test_ratio_uses_the_rounds_that_both_have():
    assert ratio(_outcome(base=[1.0, 2.0], ours=[3.0]), "m", "ours", "base") == 3.0
    assert ratio(_outcome(base=[1.0]), "m", "ours", "base") is None
    assert ratio(_outcome(base=[0.0], ours=[1.0]), "m", "ours", "base") is None


def test_ideal_is_compared_with_the_median():
    outcome = _outcome(ideal=5.0, base=[6.0, 5.0, 5.5])
    (row,) = rows(outcome, outcome.workload.metrics[0])
    assert row.of_ideal == pytest.approx(1.1)


def test_variant_that_failed_once_is_in_no_table_and_judges_nothing():
    target = Target("ours", "m", 2, "base")
    outcome = _outcome(targets=(target,), failures=(Failure("base", 1, "crashed", ""),), base=[1.0], ours=[5.0, 6.0])
    (row,) = rows(outcome, outcome.workload.metrics[0])
    assert (row.variant, row.ratio) == ("ours", None)
    (verdict,) = verdicts(outcome)
    assert (verdict.reached, verdict.met) == (None, None)


@pytest.mark.parametrize(
    ("better", "bound", "relative_to", "reached", "met"),
    [
        ("higher", 3.0, "base", 3.0, True),
        ("higher", 3.1, "base", 3.0, False),
        ("lower", 3.0, "base", 3.0, True),
        ("lower", 2.9, "base", 3.0, False),
        ("lower", 6.0, None, 6.0, True),
        ("lower", 5.9, None, 6.0, False),
        ("higher", 5.9, None, 6.0, True),
    ],
)
def test_targets_are_met_at_their_bound(better, bound, relative_to, reached, met):
    outcome = _outcome(better, (Target("ours", "m", bound, relative_to),), base=[2.0], ours=[6.0])
    (verdict,) = verdicts(outcome)
    assert (verdict.reached, verdict.met) == (reached, met)


def test_quick_sizes_judge_no_target():
    outcome = _outcome(targets=(Target("ours", "m", 2, "base"),), size="quick", base=[1.0], ours=[5.0])
    (verdict,) = verdicts(outcome)
    assert (verdict.reached, verdict.met) == (5.0, None)


def test_workload_without_baseline_has_no_ratios():
    outcome = _outcome(base=[2.0])
    outcome = replace(outcome, workload=replace(outcome.workload, baseline=None))
    assert rows(outcome, outcome.workload.metrics[0])[0].ratio is None
