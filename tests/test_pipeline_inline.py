"""A consumer that works inline: order, bounds, errors, and who makes the items when."""

import itertools
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import _pipeline
from penstock._pipeline import PrefetchPipeline
from penstock._producers import Exhausted, Producers


def drain(pipeline):
    items = []
    try:
        while True:
            items.append(pipeline.get())
    except Exhausted:
        return items
    finally:
        pipeline.close()


def inline_numbers(n, log, make=lambda i: i):
    running = threading.Lock()

    def work(i):
        if i >= n:
            raise Exhausted
        assert running.acquire(blocking=False), "two threads at once do the work of one producer"
        try:
            log.append(threading.current_thread())
            return make(i)
        finally:
            running.release()

    return Producers([work], may_run_inline=True)


@pytest.fixture
def all_is_tiny(monkeypatch):
    monkeypatch.setattr(_pipeline, "_QUICK", 10.0)
    monkeypatch.setattr(_pipeline, "_TINY", 10.0)


def test_the_consumer_works_alone_where_all_is_tiny(all_is_tiny):
    log = []
    pipeline = PrefetchPipeline(inline_numbers(500, log), 4, finish=lambda i, x: (i, x), done_capacity=2)
    assert drain(pipeline) == [(i, i) for i in range(500)]
    assert threading.current_thread() in log[100:]


def test_a_consumer_that_works_alone_stays_ahead_and_within_bounds(all_is_tiny):
    log, finished = [], []
    pipeline = PrefetchPipeline(inline_numbers(500, log), 4, finish=lambda i, x: finished.append(i) or x, done_capacity=3)
    for i in range(100):
        assert pipeline.get() == i
        assert len(finished) <= i + 1 + 3
    assert len(finished) >= 102
    pipeline.close()


def test_the_maker_takes_over_when_using_an_item_takes_longer(monkeypatch):
    monkeypatch.setattr(_pipeline, "_TINY", 0.02)
    log = []
    pipeline = PrefetchPipeline(inline_numbers(10_000, log), 4, finish=lambda i, x: x, done_capacity=2)
    for _ in range(50):
        pipeline.get()
    monkeypatch.setattr(_pipeline, "_TINY", -1.0)
    for _ in range(20):
        pipeline.get()
    del log[:]
    for _ in range(100):
        pipeline.get()
    assert threading.current_thread() not in log
    pipeline.close()


@settings(max_examples=40, deadline=None)
@given(paces=st.lists(st.sampled_from([-1.0, 10.0]), min_size=1, max_size=30), done=st.integers(1, 4))
def test_whoever_works_items_come_in_order(paces, done):
    before = _pipeline._TINY
    pipeline = PrefetchPipeline(inline_numbers(10**6, []), 4, finish=lambda i, x: x, done_capacity=done)
    try:
        taken = itertools.count()
        for pace in paces:
            _pipeline._TINY = pace
            for _ in range(7):
                assert pipeline.get() == next(taken)
    finally:
        _pipeline._TINY = before
        pipeline.close()


@pytest.mark.parametrize("where", ["make", "finish"])
def test_an_error_on_the_consumers_thread_comes_in_its_place(all_is_tiny, where):
    def fail_at_70(i):
        if i == 70:
            raise KeyError("seventy")
        return i

    make = fail_at_70 if where == "make" else lambda i: i
    finish = fail_at_70 if where == "finish" else lambda i: i
    pipeline = PrefetchPipeline(inline_numbers(100, [], make), 4, finish=lambda i, x: finish(x), done_capacity=2)
    got = []
    with pytest.raises(KeyError, match="seventy"):
        while True:
            got.append(pipeline.get())
    assert got == list(range(70))
    with pytest.raises(Exhausted):
        pipeline.get()
    pipeline.close()


def test_the_maker_fills_the_room_while_the_consumer_is_away(all_is_tiny):
    full = threading.Event()

    def make(i):
        if i >= 6:
            full.set()
        return i

    pipeline = PrefetchPipeline(inline_numbers(500, [], make), 4, finish=lambda i, x: x, done_capacity=3)
    assert pipeline.get() == 0
    assert full.wait(60)  # without another call
    assert [pipeline.get() for _ in range(50)] == list(range(1, 51))
    pipeline.close()


def test_a_slow_item_is_the_last_that_the_consumer_makes_for_now():
    """Else the time to the first batch of a slow source would be that of two, and nothing would overlap with its use."""
    log, second = [], threading.Event()

    def make(i):
        if i == 0:
            time.sleep(2 * _pipeline._SLOW)
        if i == 1:
            second.set()
        return i

    pipeline = PrefetchPipeline(inline_numbers(50, log, make), 4, finish=lambda i, x: x, done_capacity=2)
    assert pipeline.get() == 0
    assert second.wait(60)
    assert log[0] is threading.current_thread()
    assert log[1] is not threading.current_thread()
    assert drain(pipeline) == list(range(1, 50))


def test_ctrl_c_in_the_consumers_work_comes_at_once(all_is_tiny):
    def make(i):
        if i == 1:  # made ahead, in the first call
            raise KeyboardInterrupt
        return i

    pipeline = PrefetchPipeline(inline_numbers(50, [], make), 4, finish=lambda i, x: x, done_capacity=2)
    with pytest.raises(KeyboardInterrupt):
        pipeline.get()
    pipeline.close()
