"""The choice among the plans that were found."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.shard.search.solver import Candidate, choose


def candidate(name, seconds, memory=1.0, sent=1, collectives=1, baseline=False):
    return Candidate([(name,)], seconds, sent, collectives, memory, baseline)


def best(*found, limit=10.0):
    return found[choose(found, limit)].assignment[0][0]


def test_the_fastest_plan_is_chosen():
    assert best(candidate("slow", 1.1, memory=0.1), candidate("fast", 1.0)) == "fast"


def test_of_near_ties_in_time_the_one_of_less_memory_is_chosen():
    assert best(candidate("fast", 1.0), candidate("small", 1.015, memory=0.5)) == "small"
    assert best(candidate("fast", 1.0), candidate("small", 1.03, memory=0.5)) == "fast"


def test_of_near_ties_in_time_and_memory_the_one_that_sends_less_is_chosen():
    assert best(candidate("more", 1.0, sent=9), candidate("less", 1.005, memory=1.005, sent=8, collectives=3)) == "less"
    assert best(candidate("more", 1.0, sent=9), candidate("less", 1.005, memory=1.1, sent=8)) == "more"


def test_of_near_ties_that_send_as_much_the_one_with_fewer_collectives_is_chosen():
    assert best(candidate("strange", 1.0, collectives=9), candidate("plain", 1.005, memory=1.005)) == "plain"
    assert best(candidate("strange", 1.0, collectives=9), candidate("plain", 1.005, memory=1.1)) == "strange"


def test_a_baseline_that_is_nearly_as_fast_is_chosen():
    assert best(candidate("found", 1.0, memory=0.5), candidate("FSDP", 1.07, baseline=True)) == "FSDP"
    assert best(candidate("found", 1.0, memory=0.5), candidate("FSDP", 1.09, baseline=True)) == "found"
    assert best(candidate("found", 1.0), candidate("FSDP", 1.015, memory=11.0, baseline=True)) == "found"


def test_only_what_fits_is_chosen():
    assert best(candidate("large", 0.1, memory=11.0), candidate("small", 1.0)) == "small"


def test_where_nothing_fits_it_is_the_smallest():
    assert best(candidate("large", 0.1, memory=12.0), candidate("smaller", 1.0, memory=11.0)) == "smaller"


def test_near_ties_are_counted_from_the_fastest_that_fits_and_not_from_one_to_the_next():
    found = candidate("first", 1.0), candidate("second", 1.015, memory=0.9), candidate("third", 1.03, memory=0.1)
    assert best(*found) == "second"
    assert best(candidate("large", 0.5, memory=11.0), *found) == "second"
    assert best(*found[1:]) == "third"


def test_of_baselines_that_are_near_ties_the_one_of_less_memory_is_chosen():
    near = candidate("data parallel", 1.0, baseline=True), candidate("FSDP", 1.015, memory=0.5, baseline=True)
    assert best(candidate("found", 1.0, memory=0.1), *near) == "FSDP"


def test_of_equally_plain_near_ties_the_fastest_is_chosen():
    assert best(candidate("slow", 1.005), candidate("fast", 1.0)) == "fast"


some = st.builds(
    candidate,
    st.integers(),
    st.sampled_from([1.0, 1.01, 1.02, 1.03, 2.0]),
    st.sampled_from([1.0, 1.01, 2.0, 20.0]),
    st.integers(0, 3),
    st.integers(0, 3),
    st.booleans(),
)


@given(st.lists(some, min_size=1, max_size=6), st.data())
def test_the_choice_is_near_the_fastest_and_does_not_depend_on_the_order(found, data):
    other = data.draw(st.permutations(found))
    chosen, again = found[choose(found, 10.0)], other[choose(other, 10.0)]
    fitting = [each for each in found if each.memory <= 10.0]
    if not fitting:
        assert chosen.memory == again.memory == min(each.memory for each in found)
        return
    certain = [each for each in fitting if each.baseline and each.seconds <= 1.08 * min(each.seconds for each in fitting)]
    eligible = certain or fitting
    near = [each for each in eligible if each.seconds <= 1.02 * min(each.seconds for each in eligible)]
    smallest = [each for each in near if each.memory <= 1.02 * min(each.memory for each in near)]
    assert chosen in smallest
    assert (chosen.sent, chosen.collectives) == min((each.sent, each.collectives) for each in smallest)
    assert (chosen.seconds, chosen.sent, chosen.collectives) == (again.seconds, again.sent, again.collectives)
