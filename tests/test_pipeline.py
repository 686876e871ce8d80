"""Threads that run ahead: order, bounds, errors and the end, whatever is quick and whatever is slow."""

import gc
import itertools
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipelines import drain

from penstock import _pipeline
from penstock._pipeline import Exhausted, GetTimeout, PipelineClosed, PrefetchPipeline, Producers


def numbers(n, make=lambda i: i, producers=1):
    def work(i):
        if i >= n:
            raise Exhausted
        return make(i)

    return Producers([work] * producers)


@pytest.fixture(params=["quick", "slow"])
def pace(request, monkeypatch):
    """Whether producers finish what they made, or a separate finisher thread does."""
    if request.param == "slow":
        monkeypatch.setattr(_pipeline, "_QUICK", -1.0)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 200),
    producers=st.integers(1, 4),
    capacity=st.integers(1, 6),
    done=st.integers(1, 5),
    quick=st.sampled_from([-1.0, 0.5e-3, 10.0]),
)
def test_items_come_in_order_once_each(n, producers, capacity, done, quick):
    before, _pipeline._QUICK = _pipeline._QUICK, quick
    try:
        finishing = drain(
            PrefetchPipeline(numbers(n, producers=producers), capacity, finish=lambda i, x: (i, x), done_capacity=done)
        )
        assert finishing == [(i, i) for i in range(n)]
        assert drain(PrefetchPipeline(numbers(n, producers=producers), capacity)) == list(range(n))
    finally:
        _pipeline._QUICK = before


@pytest.mark.parametrize("producers", [1, 3])
@pytest.mark.parametrize(("capacity", "done"), [(1, 1), (4, 2), (3, 5)])
def test_it_never_runs_further_ahead_than_its_bounds(pace, producers, capacity, done):
    started, finished, taken = itertools.count(), itertools.count(), 0
    most_made = most_finished = 0

    def make(i):
        nonlocal most_made
        most_made = max(most_made, next(started) + 1 - taken)
        return i

    def finish(i, x):
        nonlocal most_finished
        most_finished = max(most_finished, next(finished) + 1 - taken)
        return x

    pipeline = PrefetchPipeline(numbers(100, make, producers), capacity, finish=finish, done_capacity=done)
    while True:
        try:
            pipeline.get()
        except Exhausted:
            break
        taken += 1
    pipeline.close()
    # The count of `taken` here lags by the item that is being handed over.
    assert most_finished <= done + 1
    assert most_made <= max(capacity, producers) + done + 1


@pytest.mark.parametrize("where", ["make", "finish"])
@pytest.mark.parametrize("producers", [1, 3])
def test_an_error_comes_in_its_place_once_and_then_the_end(pace, where, producers):
    def fail_at_7(i):
        if i == 7:
            raise KeyError("seven")
        return i

    if where == "make":
        pipeline = PrefetchPipeline(numbers(20, fail_at_7, producers), 4, finish=lambda i, x: x, done_capacity=2)
    else:
        pipeline = PrefetchPipeline(numbers(20, producers=producers), 4, finish=lambda i, x: fail_at_7(x), done_capacity=2)
    assert [pipeline.get() for _ in range(7)] == list(range(7))
    with pytest.raises(KeyError, match="seven"):
        pipeline.get()
    for _ in range(2):
        with pytest.raises(Exhausted):
            pipeline.get()
    pipeline.close()


def test_stop_iteration_from_inside_is_an_error_and_no_end():
    def stop(i):
        raise StopIteration

    pipeline = PrefetchPipeline(Producers([stop]), 2)
    with pytest.raises(RuntimeError, match="StopIteration"):
        pipeline.get()
    pipeline.close()


def test_a_ready_item_is_had_while_the_next_one_takes_for_ever():
    """The consumer waits for a full buffer for a moment at most."""
    blocked = threading.Event()

    def make(i):
        if i == 1:
            blocked.wait()
        return i

    pipeline = PrefetchPipeline(numbers(5, make), 4, finish=lambda i, x: x, done_capacity=4)
    assert pipeline.get(timeout=60) == 0
    blocked.set()
    assert drain(pipeline) == [1, 2, 3, 4]


def test_made_items_are_finished_while_the_producer_is_at_work():
    """A hiccup of the source is hidden by all that was made before, not only by what was finished."""
    blocked, reached = threading.Event(), threading.Event()

    def make(i):
        if i == 5:
            reached.set()
            blocked.wait()
        return i

    pipeline = PrefetchPipeline(numbers(6, make), 4, finish=lambda i, x: x, done_capacity=2)
    got = [pipeline.get()]
    got += [pipeline.get(timeout=60) for _ in range(4)]
    assert got == [0, 1, 2, 3, 4]
    assert reached.wait(60)
    blocked.set()
    assert drain(pipeline) == [5]


def test_slow_producers_work_at_the_same_time():
    together = threading.Barrier(3)
    pipeline = PrefetchPipeline(numbers(3, lambda i: together.wait(60) >= 0, producers=3), 3)
    assert drain(pipeline) == [True] * 3


def test_slow_finishing_runs_beside_making(monkeypatch):
    """Item 0 is being finished until item 2 is made: on one thread this would never end."""
    monkeypatch.setattr(_pipeline, "_QUICK", -1.0)
    made = threading.Event()

    def make(i):
        if i == 2:
            made.set()
        return i

    def finish(i, x):
        assert made.wait(60)
        return x

    assert drain(PrefetchPipeline(numbers(4, make), 3, finish=finish, done_capacity=1)) == [0, 1, 2, 3]


@pytest.mark.parametrize("slow", [{3}, {3, 4}])
def test_the_finisher_starts_after_two_slow_items_in_a_row(slow, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(_pipeline, "time", SimpleNamespace(perf_counter=lambda: clock.now, monotonic=time.monotonic))

    def finish(i, x):
        clock.now += 1.0 if i in slow else 0.0
        return threading.current_thread().name

    names = drain(PrefetchPipeline(numbers(8), 3, finish=finish))
    assert ("penstock-1" in names) == (len(slow) == 2)  # the thread after the producer
    assert names[5] == "penstock-1" or len(slow) == 1


@settings(max_examples=60, deadline=None)
@given(
    quick=st.lists(st.sampled_from([-1.0, 10.0]), min_size=1, max_size=30),
    producers=st.integers(1, 3),
    capacity=st.integers(1, 4),
    done=st.integers(1, 4),
)
def test_items_come_in_order_while_the_thread_that_finishes_changes(quick, producers, capacity, done):
    n = 7 * len(quick) - 3
    with pytest.MonkeyPatch.context() as patch:
        pipeline = PrefetchPipeline(numbers(n, producers=producers), capacity, finish=lambda i, x: (i, x), done_capacity=done)
        got = []
        for limit in quick:
            patch.setattr(_pipeline, "_QUICK", limit)
            got += [pipeline.get() for _ in range(min(7, n - len(got)))]
        assert got == [(i, i) for i in range(n)]
        with pytest.raises(Exhausted):
            pipeline.get()
        pipeline.close()


def finished_by_the_consumer(finish):
    """Return a pipeline after item 0, and an event. Only the consumer can finish item 1: the producer waits for the event."""
    at_work, release = threading.Event(), threading.Event()

    def make(i):
        if i == 2:
            at_work.set()
            release.wait(60)
        return i

    pipeline = PrefetchPipeline(numbers(4, make), 4, finish=lambda i, x: finish(i) if i == 1 else x, done_capacity=1)
    assert at_work.wait(60)
    assert pipeline.get() == 0
    return pipeline, release


@pytest.fixture
def all_is_quick(monkeypatch):
    monkeypatch.setattr(_pipeline, "_QUICK", 1e9)


def test_a_consumer_that_finds_no_item_finishes_one(all_is_quick):
    pipeline, release = finished_by_the_consumer(lambda i: threading.current_thread())
    assert pipeline.get() is threading.current_thread()
    release.set()
    assert drain(pipeline) == [2, 3]


def test_ctrl_c_in_the_consumers_work_comes_in_that_call(all_is_quick):
    """It is meant for the consumer's thread, and for now."""

    def stop(i):
        raise KeyboardInterrupt

    pipeline, release = finished_by_the_consumer(stop)
    with pytest.raises(KeyboardInterrupt):
        pipeline.get()
    release.set()
    pipeline.close()


def test_ctrl_c_where_a_wait_has_released_its_lock_comes_in_that_call():
    go = threading.Event()
    pipeline = PrefetchPipeline(Producers([lambda number: go.wait() and number]), 1)

    def interrupt(frame, event, _):
        if frame.f_code is threading.Condition.wait.__code__:
            if event == "line" and "saved_state" in frame.f_locals:
                sys.settrace(None)
                raise KeyboardInterrupt
            return interrupt
        return None

    with pytest.raises(KeyboardInterrupt):
        sys.settrace(interrupt)
        pipeline.get()
    go.set()
    assert pipeline.get() == 0
    pipeline.close()


def test_the_consumers_work_may_close_the_pipeline(all_is_quick):
    pipeline, release = finished_by_the_consumer(lambda i: release.set() or pipeline.close())
    with pytest.raises(PipelineClosed):
        pipeline.get()


def test_a_consumer_that_must_not_finish_leaves_it_to_other_threads(all_is_quick):
    threads = set()
    pipeline = PrefetchPipeline(
        numbers(500),
        4,
        finish=lambda i, x: threads.add(threading.current_thread()) or x,
        done_capacity=2,
        consumer_context=lambda: None,
    )
    assert drain(pipeline) == list(range(500))
    assert threading.current_thread() not in threads


def test_late_is_told_and_can_be_waited_on():
    release = threading.Event()
    pipeline = PrefetchPipeline(numbers(1, lambda i: release.wait()), 1)
    for _ in range(2):
        with pytest.raises(GetTimeout):
            pipeline.get(timeout=0.01)
    release.set()
    assert pipeline.get() is True
    pipeline.close()


def test_close_returns_at_once_while_a_producer_is_blocked_and_cleanup_follows():
    blocked, cleaned = threading.Event(), threading.Event()
    pipeline = PrefetchPipeline(Producers([lambda i: blocked.wait()], cleanup=cleaned.set), 1)
    pipeline.close()
    pipeline.close()
    assert not cleaned.is_set()
    with pytest.raises(PipelineClosed):
        pipeline.get()
    blocked.set()
    assert cleaned.wait(60)


def test_interrupt_ends_blocked_work():
    blocked, cleaned = threading.Event(), threading.Event()
    pipeline = PrefetchPipeline(Producers([lambda i: blocked.wait()], interrupt=blocked.set, cleanup=cleaned.set), 1)
    pipeline.close()
    assert cleaned.is_set()


def test_close_wakes_a_waiting_consumer():
    blocked, outcome = threading.Event(), []
    pipeline = PrefetchPipeline(Producers([lambda i: blocked.wait()]), 1)

    def consume():
        with pytest.raises(PipelineClosed):
            pipeline.get()
        outcome.append("closed")

    consumer = threading.Thread(target=consume)
    consumer.start()
    pipeline.close()
    consumer.join(60)
    blocked.set()
    assert outcome == ["closed"]


def test_items_are_let_go_when_they_are_taken_or_dropped():
    class Item:
        pass

    alive = []

    def make(i):
        item = Item()
        alive.append(weakref.ref(item))
        return item

    pipeline = PrefetchPipeline(numbers(100, make), 4, finish=lambda i, x: x, done_capacity=2)
    for _ in range(20):
        pipeline.get()
    pipeline.close()
    gc.collect()
    assert [ref() for ref in alive if ref() is not None] == []


def test_an_error_of_the_context_is_not_lost():
    class Bad:
        def __enter__(self):
            raise OSError("no context")

        def __exit__(self, *error):
            pass

    pipeline = PrefetchPipeline(numbers(3), 1, context=Bad)
    with pytest.raises(OSError, match="no context"):
        pipeline.get()
    pipeline.close()


def test_many_pipelines_opened_and_closed_at_any_moment_leave_no_thread():
    threads = threading.active_count()
    for k in range(300):
        pipeline = PrefetchPipeline(numbers(50, producers=1 + k % 3), 4, finish=lambda i, x: x, done_capacity=2)
        for _ in range(k % 7):
            pipeline.get()
        pipeline.close()
    deadline = time.monotonic() + 60
    while threading.active_count() > threads and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert threading.active_count() == threads


def test_a_close_between_a_workers_look_and_its_sleep_is_not_missed():
    """As garbage collection may do, on the worker's own thread: nobody is there yet to be woken."""
    others = set(threading.enumerate())
    pipeline = PrefetchPipeline(numbers(100), 1)
    (producer,) = set(threading.enumerate()) - others
    wait = pipeline._room.wait

    def close_first(timeout=None):
        pipeline.close(wait=False)
        return wait(timeout)

    pipeline._room.wait = close_first
    pipeline.get()
    producer.join(60)
    assert not producer.is_alive()


def inline_pipeline(work, finish=lambda number, item: item):
    return PrefetchPipeline(Producers([work], inline=True), 4, finish=finish, done_capacity=2)


@pytest.mark.parametrize("slow", ["work", "consumer"])
def test_items_are_made_on_the_consumers_thread_until_work_or_the_consumer_takes_long(monkeypatch, slow):
    makers, now, seconds = [], [0.0], {"work": 0.0, "consumer": 0.0}
    monkeypatch.setattr(_pipeline, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def work(number):
        if number >= 40:
            raise Exhausted
        makers.append(threading.current_thread() is threading.main_thread())
        now[0] += seconds["work"]
        return number

    def take():
        item = pipeline.get()
        now[0] += seconds["consumer"]
        return item

    pipeline = inline_pipeline(work)
    assert [take() for _ in range(10)] == list(range(10))
    assert all(makers)
    seconds[slow] = 1e-3
    assert [take() for _ in range(30)] == list(range(10, 40))
    assert not makers[-1]
    assert makers == sorted(makers, reverse=True)  # it does not change back
    with pytest.raises(Exhausted):
        pipeline.get()


def test_an_error_of_an_inline_item_comes_once_after_the_items_before_it():
    def work(number):
        if number == 3:
            raise ValueError("item 3")
        return number

    pipeline = inline_pipeline(work)
    assert [pipeline.get() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="item 3"):
        pipeline.get()
    with pytest.raises(Exhausted):
        pipeline.get()


def test_an_inline_item_that_closes_its_pipeline_is_not_handed_over():
    def work(number):
        if number == 1:
            pipeline.close()
        return number

    pipeline = inline_pipeline(work)
    with pytest.raises(PipelineClosed):
        pipeline.get()


def test_a_consumer_that_may_not_work_starts_the_producers():
    makers = []
    pipeline = PrefetchPipeline(
        Producers([lambda number: makers.append(threading.current_thread()) or number], inline=True),
        4,
        finish=lambda number, item: item,
        consumer_context=lambda: None,
    )
    assert [pipeline.get() for _ in range(3)] == [0, 1, 2]
    assert threading.main_thread() not in makers
    pipeline.close()
