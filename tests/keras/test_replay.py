"""A Replay gives each item once and in order, wherever one reader stops and another continues."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.keras.batches import Replay, opening, replay_of


def replay(count, copy=False):
    return Replay(opening(lambda: range(count)), copy)


@given(count=st.integers(0, 20), runs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans())))
def test_nothing_is_lost_or_given_twice(count, runs):
    """Each run reads some items ahead and consumes some of them, which are forgotten, or popped one by one."""
    items, had = replay(count), []
    for ahead, taken, pops in runs:
        if pops:
            for _ in range(taken):
                try:
                    had.append(items.pop())
                except StopIteration:
                    break
            continue
        read = []
        for item, _ in zip(items, range(ahead), strict=False):
            read.append(item)
        had += read[:taken]
        items.forget(items.first + len(read[:taken]))
    assert had == list(range(len(had)))
    assert had + list(items) == list(range(count))


def test_an_error_stands_in_its_place_until_it_is_forgotten_and_is_the_last():
    def three():
        yield from "ab"
        raise KeyError("c")

    items = Replay(opening(three), copy=False)
    for _ in range(2):
        with pytest.raises(KeyError):
            items.read(2)
    assert items.read(0) == "a"
    items.forget(3)
    with pytest.raises(StopIteration):
        items.read(3)


def test_what_is_popped_after_an_error_is_nothing():
    def fails():
        yield 0
        raise KeyError

    items = Replay(opening(fails), copy=False)
    assert items.pop() == 0
    with pytest.raises(KeyError):
        items.pop()
    with pytest.raises(StopIteration):
        items.pop()


def test_arrays_are_copied_where_they_may_change():
    buffer = np.zeros(3)

    def fill():
        for number in range(3):
            buffer[:] = number
            yield {"x": buffer, "n": None}

    items = Replay(opening(fill), copy=True)
    assert [items.read(n)["x"][0] for n in (2, 1, 0)] == [2, 1, 0]


def test_a_reader_that_was_left_behind_reads_for_the_next_one():
    reading, goes_on = threading.Event(), threading.Event()

    def slow():
        yield 0
        reading.set()
        goes_on.wait(60)
        yield 1
        yield 2

    items = Replay(opening(slow), copy=False)
    left_behind = threading.Thread(target=items.read, args=(1,))
    left_behind.start()
    assert reading.wait(60)
    items.forget(1)  # does not wait
    got = []
    following = threading.Thread(target=lambda: got.extend(items))
    following.start()
    goes_on.set()
    left_behind.join(60)
    following.join(60)
    assert got == [1, 2]


def test_what_is_popped_while_another_reads_is_what_that_one_read():
    reading, goes_on = threading.Event(), threading.Event()

    def slow():
        reading.set()
        goes_on.wait(60)
        yield from range(3)

    items = Replay(opening(slow), copy=False)
    left_behind = threading.Thread(target=items.read, args=(0,))
    left_behind.start()
    assert reading.wait(60)
    got = []
    following = threading.Thread(target=lambda: got.append(items.pop()))
    following.start()
    goes_on.set()
    left_behind.join(60)
    following.join(60)
    assert [*got, *items] == [0, 1, 2]


def test_a_generator_has_one_replay_which_does_not_keep_it_alive():
    def numbers():
        yield from range(3)

    generator = numbers()
    assert replay_of(generator) is replay_of(generator)
    items = replay_of(generator)
    assert items.read(1) == 1
    del generator
    assert items.read(0) == 0
    with pytest.raises(StopIteration):
        items.read(2)
