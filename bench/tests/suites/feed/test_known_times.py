"""Verdicts are compared with arithmetic in runs that kept their times, and one disturbed run does not decide."""

from types import SimpleNamespace

import pytest

from penstock_bench.suites.feed.device_times import DeviceTimes
from penstock_bench.suites.feed.known_times import difference

STEPS, INPUT, STEP = 20, 0.03, 0.01  # two thirds are lost


def run_of(kind):
    """Return the statistics and the times of a loop whose input takes `INPUT` seconds for each batch."""
    times = DeviceTimes()
    took = INPUT * (1.4 if kind == "disturbed" else 1.0)
    for number in range(1, STEPS + 1):
        times.taken.append(number * took)
        times.begins.append(number * took)
        times.ends.append(number * took + STEP)
    share = {"right": 2 / 3, "wrong": 0.3, "disturbed": 0.76}[kind]
    stats = SimpleNamespace(seconds=STEPS * took, starved_share=share, verdict="input-bound: waits on `read`")
    return stats, times


@pytest.mark.parametrize(
    ("kinds", "counted", "is_right"),
    [
        (["right"], 1, True),
        (["wrong", "right"], 1, False),
        (["disturbed", "right"], 1, True),
        (["disturbed", "wrong"], 1, False),
        (["wrong", "right", "right"], 3, True),
        (["wrong", "disturbed", "right", "disturbed", "right"], 3, True),
        (["wrong", "right", "wrong"], 3, False),
        (["wrong", "right"], 3, False),
        (["wrong", "wrong", "wrong"], 3, False),
        (["disturbed", "disturbed"], 3, True),
    ],
)
def test_most_of_the_runs_that_kept_their_times_decide(kinds, counted, is_right):
    found = difference((run_of(kind) for kind in kinds), INPUT, STEP, "read", counted)
    assert (found == "") is is_right


def test_a_verdict_that_names_another_part_is_wrong():
    assert "input-bound on `place`" in difference([run_of("right")], INPUT, STEP, "place")
