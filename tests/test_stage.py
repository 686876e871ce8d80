"""Threads that run ahead: order, bounds, errors and the end, whatever is quick and whatever is slow."""

import gc
import itertools
import threading
import time
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import _stage
from penstock._makers import Closed, End, Late, Makers
from penstock._stage import Stage


def numbers(n, make=lambda i: i, makers=1):
    def work(i):
        if i >= n:
            raise End
        return make(i)

    return Makers([work] * makers)


def drain(stage):
    items = []
    try:
        while True:
            items.append(stage.get())
    except End:
        return items
    finally:
        stage.close()


@pytest.fixture(params=["quick", "slow"])
def pace(request, monkeypatch):
    """Whether makers finish what they made, or a thread of its own does."""
    if request.param == "slow":
        monkeypatch.setattr(_stage, "_QUICK", -1.0)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 200),
    makers=st.integers(1, 4),
    capacity=st.integers(1, 6),
    done=st.integers(1, 5),
    quick=st.sampled_from([-1.0, 0.5e-3, 10.0]),
)
def test_items_come_in_order_once_each(n, makers, capacity, done, quick):
    before, _stage._QUICK = _stage._QUICK, quick
    try:
        finishing = drain(Stage(numbers(n, makers=makers), capacity, finish=lambda i, x: (i, x), done_capacity=done))
        assert finishing == [(i, i) for i in range(n)]
        assert drain(Stage(numbers(n, makers=makers), capacity)) == list(range(n))
    finally:
        _stage._QUICK = before


@pytest.mark.parametrize("makers", [1, 3])
@pytest.mark.parametrize(("capacity", "done"), [(1, 1), (4, 2), (3, 5)])
def test_it_never_runs_further_ahead_than_its_bounds(pace, makers, capacity, done):
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

    stage = Stage(numbers(100, make, makers), capacity, finish=finish, done_capacity=done)
    while True:
        try:
            stage.get()
        except End:
            break
        taken += 1
    stage.close()
    # The count of `taken` here lags by the item that is being handed over.
    assert most_finished <= done + 1
    assert most_made <= max(capacity, makers) + done + 1


@pytest.mark.parametrize("where", ["make", "finish"])
@pytest.mark.parametrize("makers", [1, 3])
def test_an_error_comes_in_its_place_once_and_then_the_end(pace, where, makers):
    def fail_at_7(i):
        if i == 7:
            raise KeyError("seven")
        return i

    if where == "make":
        stage = Stage(numbers(20, fail_at_7, makers), 4, finish=lambda i, x: x, done_capacity=2)
    else:
        stage = Stage(numbers(20, makers=makers), 4, finish=lambda i, x: fail_at_7(x), done_capacity=2)
    assert [stage.get() for _ in range(7)] == list(range(7))
    with pytest.raises(KeyError, match="seven"):
        stage.get()
    for _ in range(2):
        with pytest.raises(End):
            stage.get()
    stage.close()


def test_stop_iteration_from_inside_is_an_error_and_no_end():
    def stop(i):
        raise StopIteration

    stage = Stage(Makers([stop]), 2)
    with pytest.raises(RuntimeError, match="StopIteration"):
        stage.get()
    stage.close()


def test_a_ready_item_is_had_while_the_next_one_takes_for_ever():
    """The consumer waits for a full buffer for a moment at most."""
    blocked = threading.Event()

    def make(i):
        if i == 1:
            blocked.wait()
        return i

    stage = Stage(numbers(5, make), 4, finish=lambda i, x: x, done_capacity=4)
    assert stage.get(timeout=60) == 0
    blocked.set()
    assert drain(stage) == [1, 2, 3, 4]


def test_made_items_are_finished_while_the_maker_is_at_work():
    """A hiccup of the source is hidden by all that was made before, not only by what was finished."""
    blocked, reached = threading.Event(), threading.Event()

    def make(i):
        if i == 5:
            reached.set()
            blocked.wait()
        return i

    stage = Stage(numbers(6, make), 4, finish=lambda i, x: x, done_capacity=2)
    got = [stage.get()]
    got += [stage.get(timeout=60) for _ in range(4)]
    assert got == [0, 1, 2, 3, 4]
    assert reached.wait(60)
    blocked.set()
    assert drain(stage) == [5]


def test_slow_makers_work_at_the_same_time():
    together = threading.Barrier(3)
    stage = Stage(numbers(3, lambda i: together.wait(60) >= 0, makers=3), 3)
    assert drain(stage) == [True] * 3


def test_slow_finishing_runs_beside_making(monkeypatch):
    """Item 0 is being finished until item 2 is made: on one thread this would never end."""
    monkeypatch.setattr(_stage, "_QUICK", -1.0)
    made = threading.Event()

    def make(i):
        if i == 2:
            made.set()
        return i

    def finish(i, x):
        assert made.wait(60)
        return x

    assert drain(Stage(numbers(4, make), 3, finish=finish, done_capacity=1)) == [0, 1, 2, 3]


def test_late_is_told_and_can_be_waited_on():
    release = threading.Event()
    stage = Stage(numbers(1, lambda i: release.wait()), 1)
    for _ in range(2):
        with pytest.raises(Late):
            stage.get(timeout=0.01)
    release.set()
    assert stage.get() is True
    stage.close()


def test_close_returns_at_once_while_a_maker_is_blocked_and_cleanup_follows():
    blocked, cleaned = threading.Event(), threading.Event()
    stage = Stage(Makers([lambda i: blocked.wait()], cleanup=cleaned.set), 1)
    stage.close()
    stage.close()
    assert not cleaned.is_set()
    with pytest.raises(Closed):
        stage.get()
    blocked.set()
    assert cleaned.wait(60)


def test_interrupt_ends_blocked_work():
    blocked, cleaned = threading.Event(), threading.Event()
    stage = Stage(Makers([lambda i: blocked.wait()], interrupt=blocked.set, cleanup=cleaned.set), 1)
    stage.close()
    assert cleaned.is_set()


def test_close_wakes_a_waiting_consumer():
    blocked, outcome = threading.Event(), []
    stage = Stage(Makers([lambda i: blocked.wait()]), 1)

    def consume():
        with pytest.raises(Closed):
            stage.get()
        outcome.append("closed")

    consumer = threading.Thread(target=consume)
    consumer.start()
    stage.close()
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

    stage = Stage(numbers(100, make), 4, finish=lambda i, x: x, done_capacity=2)
    for _ in range(20):
        stage.get()
    stage.close()
    gc.collect()
    assert [ref() for ref in alive if ref() is not None] == []


def test_an_error_of_the_context_is_not_lost():
    class Bad:
        def __enter__(self):
            raise OSError("no context")

        def __exit__(self, *error):
            pass

    stage = Stage(numbers(3), 1, context=Bad)
    with pytest.raises(OSError, match="no context"):
        stage.get()
    stage.close()


def test_many_stages_opened_and_closed_at_any_moment_leave_no_thread():
    threads = threading.active_count()
    for k in range(300):
        stage = Stage(numbers(50, makers=1 + k % 3), 4, finish=lambda i, x: x, done_capacity=2)
        for _ in range(k % 7):
            stage.get()
        stage.close()
    deadline = time.monotonic() + 60
    while threading.active_count() > threads and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert threading.active_count() == threads


def portable(n, log, make=lambda i: i):
    running = threading.Lock()

    def work(i):
        if i >= n:
            raise End
        assert running.acquire(blocking=False), "two threads at once do the work of one maker"
        try:
            log.append(threading.current_thread())
            return make(i)
        finally:
            running.release()

    return Makers([work], portable=True)


@pytest.fixture
def all_is_tiny(monkeypatch):
    monkeypatch.setattr(_stage, "_QUICK", 10.0)
    monkeypatch.setattr(_stage, "_TINY", 10.0)


def test_the_consumer_works_alone_where_all_is_tiny(all_is_tiny):
    log = []
    stage = Stage(portable(500, log), 4, finish=lambda i, x: (i, x), done_capacity=2)
    assert drain(stage) == [(i, i) for i in range(500)]
    assert threading.current_thread() in log[100:]


def test_a_consumer_that_works_alone_stays_ahead_and_within_bounds(all_is_tiny):
    log, finished = [], []
    stage = Stage(portable(500, log), 4, finish=lambda i, x: finished.append(i) or x, done_capacity=3)
    for i in range(100):
        assert stage.get() == i
        assert len(finished) <= i + 1 + 3
    assert len(finished) >= 102
    stage.close()


def test_the_maker_takes_over_when_using_an_item_takes_longer(monkeypatch):
    monkeypatch.setattr(_stage, "_TINY", 0.02)
    log = []
    stage = Stage(portable(10_000, log), 4, finish=lambda i, x: x, done_capacity=2)
    for _ in range(50):
        stage.get()
    monkeypatch.setattr(_stage, "_TINY", -1.0)
    for _ in range(20):
        stage.get()
    del log[:]
    for _ in range(100):
        stage.get()
    assert threading.current_thread() not in log
    stage.close()


@settings(max_examples=40, deadline=None)
@given(paces=st.lists(st.sampled_from([-1.0, 10.0]), min_size=1, max_size=30), done=st.integers(1, 4))
def test_whoever_works_items_come_in_order(paces, done):
    before = _stage._TINY
    stage = Stage(portable(10**6, []), 4, finish=lambda i, x: x, done_capacity=done)
    try:
        taken = itertools.count()
        for pace in paces:
            _stage._TINY = pace
            for _ in range(7):
                assert stage.get() == next(taken)
    finally:
        _stage._TINY = before
        stage.close()


@pytest.mark.parametrize("where", ["make", "finish"])
def test_an_error_on_the_consumers_thread_comes_in_its_place(all_is_tiny, where):
    def fail_at_70(i):
        if i == 70:
            raise KeyError("seventy")
        return i

    make = fail_at_70 if where == "make" else lambda i: i
    finish = fail_at_70 if where == "finish" else lambda i: i
    stage = Stage(portable(100, [], make), 4, finish=lambda i, x: finish(x), done_capacity=2)
    got = []
    with pytest.raises(KeyError, match="seventy"):
        while True:
            got.append(stage.get())
    assert got == list(range(70))
    with pytest.raises(End):
        stage.get()
    stage.close()


def test_the_maker_fills_the_room_while_the_consumer_is_away(all_is_tiny):
    full = threading.Event()

    def make(i):
        if i >= 6:
            full.set()
        return i

    stage = Stage(portable(500, [], make), 4, finish=lambda i, x: x, done_capacity=3)
    assert stage.get() == 0
    assert full.wait(60)  # without another call
    assert [stage.get() for _ in range(50)] == list(range(1, 51))
    stage.close()


def test_a_slow_item_is_the_last_that_the_consumer_makes_for_now():
    """Else the time to the first batch of a slow source would be that of two, and nothing would overlap with its use."""
    log, second = [], threading.Event()

    def make(i):
        if i == 0:
            time.sleep(2 * _stage._SLOW)
        if i == 1:
            second.set()
        return i

    stage = Stage(portable(50, log, make), 4, finish=lambda i, x: x, done_capacity=2)
    assert stage.get() == 0
    assert second.wait(60)
    assert log[0] is threading.current_thread()
    assert log[1] is not threading.current_thread()
    assert drain(stage) == list(range(1, 50))


def test_ctrl_c_in_the_consumers_work_comes_at_once(all_is_tiny):
    def make(i):
        if i == 1:  # made ahead, in the first call
            raise KeyboardInterrupt
        return i

    stage = Stage(portable(50, [], make), 4, finish=lambda i, x: x, done_capacity=2)
    with pytest.raises(KeyboardInterrupt):
        stage.get()
    stage.close()


def test_a_close_between_a_workers_look_and_its_sleep_is_not_missed():
    """As garbage collection may do, on the worker's own thread: nobody is there yet to be woken."""
    stage = Stage(numbers(100), 1)
    wait = stage._room.wait

    def close_first(timeout=None):
        stage.close(wait=False)
        return wait(timeout)

    stage._room.wait = close_first
    stage.get()
    for thread in stage._threads:
        thread.join(60)
        assert not thread.is_alive()
