"""Sentences on unknown costs have the number of places and how they count."""

from penstock.shard.wording import about_collectives, about_loops, about_operations


def test_without_unknown_costs_there_is_no_sentence():
    assert about_loops(0) == about_operations({}, "nothing") == about_collectives(0) == ()


def test_a_sentence_has_the_number_and_what_counts():
    assert "2 loops of unknown length count once each" in about_loops(2)[0]
    assert "1 operation of unknown cost counts nothing (lu)" in about_operations({"lu": 1}, "nothing")[0]
    assert "1 collective is an all-reduce or a reduce-scatter" in about_collectives(1)[0]
    assert "2 collectives are all-reduces or reduce-scatters" in about_collectives(2)[0]


def test_the_most_frequent_of_many_operations_are_named():
    (sentence,) = about_operations({"a": 1, "b": 3, "c": 2, "d": 1, "e": 1, "f": 1}, "nothing")
    assert "9 operations" in sentence
    assert "(3 × b, 2 × c, a, d, 2 other kinds)" in sentence
