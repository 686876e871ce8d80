"""The choice among the plans that were found."""

from penstock.shard.search.solver import Candidate, choose


def candidate(name, seconds, memory=1.0, collectives=1, baseline=False):
    return Candidate([(name,)], seconds, collectives, memory, 0, baseline)


def best(*found, limit=10.0):
    return found[choose(found, limit)].assignment[0][0]


def test_the_fastest_plan_is_chosen():
    assert best(candidate("slow", 1.1, memory=0.1), candidate("fast", 1.0)) == "fast"


def test_of_near_ties_in_time_the_one_of_less_memory_is_chosen():
    assert best(candidate("fast", 1.0), candidate("small", 1.015, memory=0.5)) == "small"
    assert best(candidate("fast", 1.0), candidate("small", 1.03, memory=0.5)) == "fast"


def test_of_near_ties_in_time_and_memory_the_one_with_fewer_collectives_is_chosen():
    assert best(candidate("strange", 1.0, collectives=9), candidate("plain", 1.005, memory=1.005)) == "plain"
    assert best(candidate("strange", 1.0, collectives=9), candidate("plain", 1.005, memory=1.1)) == "strange"


def test_of_near_ties_in_time_a_baseline_is_chosen():
    assert best(candidate("found", 1.0, memory=0.5), candidate("FSDP", 1.015, baseline=True)) == "FSDP"
    assert best(candidate("found", 1.0, memory=0.5), candidate("FSDP", 1.03, baseline=True)) == "found"
    assert best(candidate("found", 1.0), candidate("FSDP", 1.015, memory=11.0, baseline=True)) == "found"


def test_only_what_fits_is_chosen():
    assert best(candidate("large", 0.1, memory=11.0), candidate("small", 1.0)) == "small"


def test_where_nothing_fits_it_is_the_smallest():
    assert best(candidate("large", 0.1, memory=12.0), candidate("smaller", 1.0, memory=11.0)) == "smaller"
