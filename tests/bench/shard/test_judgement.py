from __future__ import annotations

import math

import pytest

from penstock.bench.suites.shard.case import Attempt, Case, Planned, Prediction, Score, Training
from penstock.bench.suites.shard.judgement import best_within, cells_of, judge

GB = 10**9


def score(seconds: float, memory: int = GB, **more) -> Score:
    return Score(**{"seconds": seconds, "memory": memory, "arguments": 100, "wire": 1000.0, "flops": 1e9, **more})


def case(*plans: Planned, training: Training | None = None, failure: str = "") -> Case:
    """With a baseline of 2 s that needs 4 GB, one of 3 s that needs 1 GB, and one that does not compile."""
    baselines = (
        Attempt("data parallel", score(2.0, 4 * GB)),
        Attempt("FSDP", score(3.0, GB)),
        Attempt("Megatron", None, "does not compile"),
    )
    return Case("mlp", "8", baselines, plans, training, failure)


def planned(seconds: float, memory: int = GB, limit: int = 2 * GB, **more) -> Planned:
    given = {"planning": 1.0, "score": score(seconds, memory), "predicted": Prediction(100, memory, 1000.0), **more}
    return Planned("half", limit, **given)


def verdicts(*cases: Case) -> dict[str, bool | None]:
    found = [verdict.met for verdict in judge(cases)]
    return dict(zip(["never slower", "faster", "kept", "arguments", "memory", "wire", "planning", "losses"], found, strict=True))


def misses(place: int, *cases: Case) -> tuple[str, ...]:
    return judge(cases)[place].misses


def test_a_plan_is_held_against_the_fastest_baseline_that_keeps_the_limit():
    tight, roomy = cells_of(case(planned(1.5), planned(1.5, limit=8 * GB)))
    assert (tight.best.name, tight.ratio) == ("FSDP", 0.5)
    assert (roomy.best.name, roomy.ratio) == ("data parallel", 0.75)


def test_of_baselines_as_fast_as_each_other_the_smaller_is_the_best():
    found = best_within([Attempt("large", score(1.0, 2 * GB)), Attempt("small", score(1.0, GB))], None)
    assert found.name == "small"


def test_no_baseline_is_the_best_where_none_fits():
    assert best_within(case().baselines, GB // 2) is None


def test_all_targets_are_met_by_a_plan_that_is_fast_small_and_as_predicted():
    found = verdicts(case(planned(1.5), training=Training((2.0, 1.0), (2.0, 1.00001))))
    assert set(found.values()) == {True}


def test_a_plan_as_fast_as_the_baseline_is_not_slower_and_not_faster():
    found = verdicts(case(planned(3.0)))
    assert found["never slower"] is True
    assert found["faster"] is False


def test_a_slower_plan_is_named_with_its_ratio():
    slow = case(planned(3.3), planned(1.0))
    assert verdicts(slow)["never slower"] is False
    assert misses(0, slow) == ("mlp on 8, half: 1.100× FSDP",)


def test_half_of_the_cells_are_enough_to_be_often_faster():
    assert verdicts(case(planned(1.0), planned(3.0)))["faster"] is True
    assert verdicts(case(planned(1.0), planned(3.0), planned(3.0)))["faster"] is False


def test_a_fast_plan_over_the_limit_has_not_won():
    over = case(planned(1.0, memory=3 * GB))
    found = verdicts(over)
    assert (found["never slower"], found["faster"], found["kept"]) == (False, False, False)
    assert misses(2, over) == ("mlp on 8, half: 1.50× the limit, 0.333× FSDP",)


def test_no_plan_where_a_baseline_fits_is_a_miss():
    refused = case(Planned("half", 2 * GB, 1.0, reason="no layout fits", refused=True))
    found = verdicts(refused)
    assert (found["never slower"], found["kept"]) == (False, False)
    assert misses(0, refused) == ("mlp on 8, half: no plan: no layout fits",)


def test_no_plan_where_nothing_fits_counts_for_nothing():
    found = judge([case(Planned("half", GB // 2, 1.0, reason="no layout fits", refused=True))])
    assert (found[0].met, found[2].met) == (None, None)
    assert found[0].reached == "0 of 0 cells; nothing fits in 1 more"


def test_a_plan_that_alone_fits_is_told():
    (found, *_) = judge([case(planned(9.0, memory=1, limit=GB // 2), planned(1.0))])
    assert (found.met, found.reached) == (True, "1 of 1 cells; only the plan fits in 1 more")


def test_a_plan_over_its_limit_is_told_where_no_baseline_keeps_it_either():
    kept = judge([case(planned(1.0, memory=GB, limit=GB // 2))])[2]
    assert (kept.met, kept.reached) == (None, "0 of 0 cells; over it in 1 more, where no baseline keeps it either")


def test_a_case_that_failed_is_a_miss():
    broken = Case("mlp", "8", failure="ended by signal 6")
    assert verdicts(broken)["never slower"] is False
    assert misses(0, broken) == ("mlp on 8: ended by signal 6",)


def test_errors_of_prediction_are_judged_by_their_median():
    off = [planned(1.0, predicted=Prediction(100, int(GB * share), 1000.0 * share)) for share in (0.7, 1.1, 1.0)]
    assert verdicts(case(*off))["memory"] is True
    assert misses(4, case(*off)) == ("mlp on 8, half: -30%",)
    far = verdicts(case(off[0], off[0], off[2]))
    assert (far["memory"], far["wire"]) == (False, False)


def test_arguments_are_exact_or_not():
    off = case(planned(1.0), planned(1.0, predicted=Prediction(104, GB, 1000.0)))
    assert verdicts(off)["arguments"] is False
    assert misses(3, off) == ("mlp on 8, half: +4 bytes",)


@pytest.mark.parametrize(("predicted", "error"), [(0.0, 0.0), (8.0, math.inf)])
def test_a_program_that_sends_nothing_is_predicted_or_not(predicted, error):
    silent = planned(1.0, score=score(1.0, wire=0.0), predicted=Prediction(100, GB, predicted))
    (cell,) = cells_of(case(silent))
    assert cell.wire_error == error


def test_planning_has_a_limit():
    assert misses(6, case(planned(1.0, planning=12.34))) == ("mlp on 8, half: 12.3 s",)


@pytest.mark.parametrize(
    ("training", "met"),
    [
        (Training((2.0, 1.0), (2.0, 1.0002)), False),
        (Training((2.0, math.nan), (2.0, math.nan)), False),
        (Training(reason="ended by signal 6"), False),
        (None, None),
    ],
)
def test_losses_must_agree(training, met):
    assert verdicts(case(planned(1.0), training=training))["losses"] is met
