"""Inline work on the consumer's thread: order, bounds, errors, and who produces the items when."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipelines import drain

from penstock import _pace
from penstock._pipeline import PrefetchPipeline
from penstock._producers import Exhausted, PipelineClosed, Producers


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
    monkeypatch.setattr(_pace, "QUICK", 10.0)
    monkeypatch.setattr(_pace, "TINY", 10.0)


@pytest.fixture
def all_is_short(monkeypatch):
    """Nothing is tiny, so the trials decide. They begin with the consumer alone, and come often."""
    monkeypatch.setattr(_pace, "TINY", -1.0)
    monkeypatch.setattr(_pace, "SHORT", 10.0)
    monkeypatch.setattr(_pace, "IDLE", 10.0)
    monkeypatch.setattr(_pace, "_FIRST", 20)
    monkeypatch.setattr(_pace, "_SECONDS", 0.0)


def test_the_consumer_produces_where_all_is_tiny(all_is_tiny):
    log = []
    pipeline = PrefetchPipeline(inline_numbers(500, log), 4, finish=lambda i, x: (i, x), done_capacity=2)
    assert drain(pipeline) == [(i, i) for i in range(500)]
    assert threading.current_thread() in log[100:]


def test_a_consumer_that_produces_stays_within_bounds(all_is_tiny):
    log, finished = [], []
    pipeline = PrefetchPipeline(inline_numbers(500, log), 4, finish=lambda i, x: finished.append(i) or x, done_capacity=3)
    for i in range(100):
        assert pipeline.get() == i
        assert len(finished) <= i + 1 + 3
    pipeline.close()


def test_the_producer_takes_over_when_using_an_item_takes_longer(monkeypatch):
    monkeypatch.setattr(_pace, "TINY", 0.02)
    log = []
    pipeline = PrefetchPipeline(inline_numbers(10_000, log), 4, finish=lambda i, x: x, done_capacity=2)
    for _ in range(50):
        pipeline.get()
    monkeypatch.setattr(_pace, "TINY", -1.0)
    monkeypatch.setattr(_pace, "IDLE", -1.0)
    monkeypatch.setattr(_pace, "IDLE_SHARE", -1.0)
    for _ in range(20):
        pipeline.get()
    del log[:]
    for _ in range(100):
        pipeline.get()
    assert threading.current_thread() not in log
    pipeline.close()


@settings(max_examples=60, deadline=None)
@given(
    paces=st.lists(st.tuples(*[st.sampled_from([-1.0, 0.2e-3, 10.0])] * 2), min_size=1, max_size=30),
    capacity=st.integers(1, 4),
    done=st.integers(1, 4),
    inline=st.booleans(),
)
def test_whoever_works_items_come_in_order_and_end(paces, capacity, done, inline):
    n = 7 * len(paces) - 3
    producers = inline_numbers(n, [])._replace(may_run_inline=inline)
    with pytest.MonkeyPatch.context() as patch:
        pipeline = PrefetchPipeline(producers, capacity, finish=lambda i, x: (i, x), done_capacity=done)
        got = []
        for tiny, quick in paces:
            patch.setattr(_pace, "TINY", tiny)
            patch.setattr(_pace, "QUICK", quick)
            got += [pipeline.get() for _ in range(min(7, n - len(got)))]
        assert got == [(i, i) for i in range(n)]
        for _ in range(2):
            with pytest.raises(Exhausted):
                pipeline.get()
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


def test_the_producer_fills_the_room_while_the_consumer_is_away(all_is_tiny):
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


def test_the_first_items_are_produced_ahead():
    """Else nothing would overlap with the use of the first items of a slow source."""
    log, fifth = [], threading.Event()

    def make(i):
        if i == 4:
            fifth.set()
        return i

    pipeline = PrefetchPipeline(inline_numbers(50, log, make), 4, finish=lambda i, x: x, done_capacity=2)
    assert pipeline.get() == 0
    assert fifth.wait(60)
    assert log[0] is not threading.current_thread()
    assert drain(pipeline) == list(range(1, 50))


@pytest.mark.parametrize("where", ["make", "finish"])
def test_ctrl_c_in_the_consumers_work_comes_in_that_call(all_is_tiny, where):
    """It is meant for the consumer's thread, and for now."""

    def stop(i):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return i

    make = stop if where == "make" else lambda i: i
    finish = stop if where == "finish" else lambda i: i
    pipeline = PrefetchPipeline(inline_numbers(10**6, [], make), 4, finish=lambda i, x: finish(x), done_capacity=2)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(10**6):
            pipeline.get()
    pipeline.close()


def test_trials_change_who_works_and_lose_no_item(all_is_short):
    log = []
    pipeline = PrefetchPipeline(inline_numbers(3000, log), 4, finish=lambda i, x: (i, x), done_capacity=2)
    assert drain(pipeline) == [(i, i) for i in range(3000)]
    assert len(set(log)) == 2


@pytest.mark.parametrize("done", [1, 2, 4])
def test_a_consumer_alone_makes_one_item_ahead(monkeypatch, all_is_short, done):
    monkeypatch.setattr(_pace, "_FIRST", 10**9)
    made = []
    pipeline = PrefetchPipeline(inline_numbers(500, made), 4, finish=lambda i, x: x, done_capacity=done)
    for i in range(200):
        assert pipeline.get() == i
        if i > 50:
            assert made[i] is threading.current_thread()
            assert len(made) == i + min(2, done)
    pipeline.close()


def test_an_item_that_is_now_and_then_slow_changes_nothing(all_is_short):
    slow = threading.Event()

    def make(i):
        if i % 50 == 7:
            slow.wait(0.02)
        return i

    assert drain(PrefetchPipeline(inline_numbers(400, [], make), 4, finish=lambda i, x: x, done_capacity=2)) == list(range(400))


def test_work_alone_may_close_the_pipeline(all_is_short):
    def make(i):
        if i == 100:
            pipeline.close()
        return i

    pipeline = PrefetchPipeline(inline_numbers(500, [], make), 4, finish=lambda i, x: x, done_capacity=2)
    with pytest.raises(PipelineClosed):
        for _ in range(500):
            pipeline.get()


def test_work_alone_may_use_another_pipeline(all_is_short):
    inner = PrefetchPipeline(inline_numbers(500, []), 4, finish=lambda i, x: x, done_capacity=2)
    outer = PrefetchPipeline(inline_numbers(400, [], lambda i: inner.get()), 4, finish=lambda i, x: x, done_capacity=2)
    assert drain(outer) == list(range(400))
    inner.close()


def test_the_producer_fills_the_room_behind_a_consumer_alone_that_went_away(all_is_short):
    made, full = [], threading.Event()

    def make(i):
        made.append(i)
        if i == 105:
            full.set()
        return i

    pipeline = PrefetchPipeline(inline_numbers(500, [], make), 4, finish=lambda i, x: x, done_capacity=2)
    for _ in range(100):
        pipeline.get()
    assert full.wait(60)
    assert [pipeline.get() for _ in range(50)] == list(range(100, 150))
    pipeline.close()
