from __future__ import annotations

import math

import pytest
from bench.tests.simulation import MACHINE

from penstock_bench.model import Measurement
from penstock_bench.outcome import Outcome, Run, Sample
from penstock_bench.suites.shard.comparison import best_within, compare, losses_measurement, measurements, plan_measurement
from penstock_bench.suites.shard.scores import BaselineScore, Losses, OwnBaseline, PlanScore, Prediction, Score
from penstock_bench.suites.shard.task import Task
from penstock_bench.suites.shard.workload import plans_workload, training_workload
from penstock_bench.verdict import Verdict, judge

GB = 10**9
TASK = Task("mlp", "8")


def score(seconds: float, memory: int = GB, **more) -> Score:
    figures = {"seconds": seconds, "memory": memory, "arguments": 100, "bytes_on_wire": 1000.0, "flops": 1e9}
    return Score(**figures | {"seconds_with_latency": 2 * seconds} | more)


# One of 2 s that needs 4 GB, one of 3 s that needs 1 GB, and one that does not compile.
BASELINES = (
    BaselineScore("data parallel", score(2.0, 4 * GB)),
    BaselineScore("FSDP", score(3.0, GB)),
    BaselineScore("Megatron", None, "does not compile"),
)


def planned(seconds: float, memory: int = GB, limit: int = 2 * GB, **more) -> PlanScore:
    given = {"planning": 1.0, "gap": 0.004, "score": score(seconds, memory), "predicted": Prediction(100, memory, 1000.0), **more}
    return PlanScore("half", limit, **given)


def refused(limit: int) -> PlanScore:
    return PlanScore("half", limit, 1.0, reason="no layout fits", refused=True)


def judged(workload, measurements: dict[str, Measurement]) -> tuple[Verdict, ...]:
    samples = [
        Sample(name, False, 0, 0, 0.0, 1.0, None, made.values, {}, made.details, made.remarks)
        for name, made in measurements.items()
    ]
    outcome = Outcome(workload, "full", None, tuple(samples))
    (verdicts,) = judge(Run("shard", "full", 0, MACHINE, (outcome,), 1.0)).verdicts
    return verdicts


def verdicts(*plans: PlanScore) -> dict[str, Verdict]:
    made = {f"plan {number}": plan_measurement(TASK, BASELINES, plan) for number, plan in enumerate(plans)}
    return named(judged(plans_workload([TASK]), made))


def named(found: tuple[Verdict, ...]) -> dict[str, Verdict]:
    names = [
        "never slower",
        "faster",
        "kept",
        "refusals",
        "arguments",
        "memory",
        "worst memory",
        "bytes_on_wire",
        "gap",
        "planning",
    ]
    return dict(zip(names, found, strict=True))


def test_a_plan_is_held_against_the_fastest_baseline_that_keeps_the_limit():
    tight, roomy = (compare(BASELINES, planned(1.5, limit=limit)) for limit in (2 * GB, 8 * GB))
    assert (tight.best.name, tight.ratio) == ("FSDP", 0.5)
    assert (roomy.best.name, roomy.ratio) == ("data parallel", 0.75)


def test_with_latency_another_baseline_may_be_the_best():
    few, many = (score(seconds, seconds_with_latency=longer) for seconds, longer in ((3.0, 3.5), (2.0, 9.0)))
    found = compare([BaselineScore("few", few), BaselineScore("many", many)], planned(7.0))
    assert (found.ratio, found.ratio_with_latency) == (3.5, 4.0)


def test_of_baselines_as_fast_as_each_other_the_smaller_is_the_best():
    found = best_within([BaselineScore("large", score(1.0, 2 * GB)), BaselineScore("small", score(1.0, GB))], None)
    assert found.name == "small"


def test_no_baseline_is_the_best_where_none_fits():
    assert best_within(BASELINES, GB // 2) is None


def test_all_targets_are_met_by_a_plan_that_is_fast_small_and_as_predicted():
    assert {verdict.met for verdict in verdicts(planned(1.5)).values()} == {True}


def test_a_plan_as_fast_as_the_baseline_is_not_slower_and_not_faster():
    found = verdicts(planned(3.0))
    assert found["never slower"].met is True
    assert found["faster"].met is False


def test_a_slower_plan_is_named_with_its_ratio():
    found = verdicts(planned(3.3), planned(1.0))["never slower"]
    assert (found.met, found.misses) == (False, ("plan 0: 1.100 × best by hand",))


def test_half_of_the_plans_are_enough_to_be_often_faster():
    assert verdicts(planned(1.0), planned(3.0))["faster"].met is True
    assert verdicts(planned(1.0), planned(3.0), planned(3.0))["faster"].met is False


def test_a_fast_plan_over_the_limit_has_not_won():
    found = verdicts(planned(1.0, memory=3 * GB))
    assert [found[name].met for name in ("never slower", "faster", "kept")] == [False] * 3
    assert found["kept"].misses == ("plan 0: 1.50× the limit, 0.333× FSDP",)


def test_no_plan_where_a_baseline_fits_is_a_miss():
    found = verdicts(refused(2 * GB))
    assert (found["never slower"].met, found["kept"].met) == (False, False)
    assert found["never slower"].misses == ("plan 0: no plan: no layout fits",)


def test_refusals_of_limits_that_a_baseline_keeps_are_counted():
    found = verdicts(refused(2 * GB), refused(2 * GB), planned(1.0), refused(GB // 2))["refusals"]
    assert (found.met, found.reached, found.counted, found.exempt) == (False, 2.0, 3, {"no baseline keeps the limit": 1})
    assert [miss.partition(":")[0] for miss in found.misses] == ["plan 0", "plan 1"]
    assert verdicts(planned(1.0), refused(GB // 2))["refusals"].met is True


def test_no_plan_where_nothing_fits_counts_for_nothing():
    found = verdicts(refused(GB // 2))
    assert (found["never slower"].met, found["kept"].met) == (None, None)
    assert found["never slower"].exempt == {"nothing fits": 1}


def test_a_plan_that_alone_fits_is_told():
    found = verdicts(planned(9.0, memory=1, limit=GB // 2), planned(1.0))["never slower"]
    assert (found.met, found.counted, found.exempt) == (True, 1, {"only the plan fits": 1})


def test_a_plan_over_its_limit_is_told_where_no_baseline_keeps_it_either():
    kept = verdicts(planned(1.0, memory=GB, limit=GB // 2))["kept"]
    assert (kept.met, kept.exempt) == (None, {"over the limit, which no baseline keeps either": 1})


def test_a_refused_plan_has_not_failed_and_an_error_has():
    broken = PlanScore("half", 2 * GB, 1.0, reason="planning failed: KeyError")
    assert plan_measurement(TASK, BASELINES, broken).remarks.failure == "planning failed: KeyError"
    assert plan_measurement(TASK, BASELINES, refused(2 * GB)).remarks.failure == ""
    assert verdicts(broken)["never slower"].met is False


def test_errors_of_prediction_are_judged_by_their_median():
    off = [planned(1.0, predicted=Prediction(100, int(GB * share), 1000.0 * share)) for share in (0.7, 1.09, 1.0)]
    found = verdicts(*off)["memory"]
    assert (found.met, found.misses) == (True, ("plan 0: -30.00 %",))
    far = verdicts(off[0], off[0], off[2])
    assert (far["memory"].met, far["bytes_on_wire"].met) == (False, False)


def test_one_prediction_may_not_be_far_off():
    off = [planned(1.0, predicted=Prediction(100, int(GB * share), 1000.0)) for share in (1.0, 1.0, 1.31)]
    found = verdicts(*off)
    assert (found["memory"].met, found["worst memory"].met) == (True, False)
    assert found["worst memory"].misses == ("plan 2: 31.00 %",)


def test_baselines_of_the_planner_count_among_predictions_only():
    own = OwnBaseline("ZeRO-1", Prediction(100, 2 * GB, 1000.0), score(1.0))
    made = measurements(TASK, BASELINES, [planned(1.0)], [own])
    assert list(made) == ["half", "planner's ZeRO-1"]
    found = named(judged(plans_workload([TASK]), {f"mlp 8 {name}": each for name, each in made.items()}))
    assert found["worst memory"].misses == ("mlp 8 planner's ZeRO-1: 100.0 %",)
    assert {name: verdict.counted for name, verdict in found.items() if verdict.counted != 2} == {
        **dict.fromkeys(["never slower", "faster", "kept", "refusals", "gap", "planning"], 1)
    }


def test_arguments_are_exact_or_not():
    found = verdicts(planned(1.0), planned(1.0, predicted=Prediction(104, GB, 1000.0)))["arguments"]
    assert (found.met, found.misses) == (False, ("plan 1: 4.000 bytes",))


@pytest.mark.parametrize(("predicted", "met"), [(0.0, True), (8.0, False)])
def test_a_program_that_sends_nothing_is_predicted_or_not(predicted, met):
    silent = planned(1.0, score=score(1.0, bytes_on_wire=0.0), predicted=Prediction(100, GB, predicted))
    assert verdicts(silent)["bytes_on_wire"].met is met


def test_planning_and_what_is_not_proved_have_a_limit():
    found = verdicts(planned(1.0, planning=12.34, gap=0.03))
    assert found["planning"].misses == ("plan 0: 12.34 s",)
    assert found["gap"].misses == ("plan 0: 3.000 %",)
    assert verdicts(planned(1.0, gap=None))["gap"].counted == 0


@pytest.mark.parametrize(
    ("planned_losses", "met"),
    [((2.0, 1.00001), True), ((2.0, 1.0002), False), ((2.0, math.nan), False)],
)
def test_losses_must_agree(planned_losses, met):
    losses = losses_measurement(TASK, Losses((2.0, 1.0), planned_losses, "half"))
    (found,) = judged(training_workload([TASK]), {"mlp 8": losses})
    assert found.met is met
