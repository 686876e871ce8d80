"""The choice among the plans that were found."""

from penstock.shard.mesh.lookup import find_hardware
from penstock.shard.search.solver import Candidate, choose


def candidate(name, seconds, bare, memory=1.0):
    return Candidate([(name,)], seconds, bare, memory, 0)


def best(*found, baselines=(), limit=10.0):
    return choose([*baselines, *found], baselines, limit).assignment[0][0]


def test_what_computes_and_sends_less_is_taken_if_it_is_about_as_fast():
    assert best(candidate("fast", 1.0, 1.0), candidate("lean", 1.2, 0.5)) == "lean"
    assert best(candidate("fast", 1.0, 1.0), candidate("lean", 1.2, 0.9)) == "fast"


def test_nothing_is_taken_that_is_much_slower():
    assert best(candidate("fast", 1.0, 1.0), candidate("lean", 1.6, 0.1)) == "fast"


def test_nothing_is_put_before_a_baselines_plan_that_is_faster():
    baselines = (candidate("baselines", 1.1, 1.0),)
    assert best(candidate("fast", 1.0, 1.0), candidate("lean", 1.3, 0.1), baselines=baselines) == "fast"


def test_nothing_is_put_before_a_baselines_plan_that_computes_and_sends_less():
    baselines = (candidate("baselines", 1.4, 0.9),)
    assert best(candidate("fast", 1.0, 1.0), candidate("middle", 1.3, 0.9), baselines=baselines) == "middle"


def test_of_plans_as_good_the_baselines_one_is_taken():
    assert best(candidate("strange", 0.99, 1.0), baselines=(candidate("baselines", 1.0, 1.0),)) == "baselines"
    assert best(candidate("strange", 0.95, 1.0), baselines=(candidate("baselines", 1.0, 1.0),)) == "strange"


def test_only_what_fits_is_taken_and_is_a_standard():
    baselines = (candidate("large", 0.1, 0.1, memory=11.0),)
    assert best(candidate("small", 1.0, 1.0), baselines=baselines) == "small"


def test_where_nothing_fits_it_is_the_smallest():
    assert best(candidate("large", 0.1, 0.1, memory=12.0), candidate("smaller", 1.0, 1.0, memory=11.0)) == "smaller"


def test_hardware_that_hides_its_traffic_and_latency():
    before = find_hardware("h100")
    after = before.overlapping(0.75)
    assert after.memory_bandwidth == 4 * before.memory_bandwidth
    assert after.link_latency == before.link_latency / 4
    assert after.flops == before.flops
    assert after.link_bandwidth == before.link_bandwidth
