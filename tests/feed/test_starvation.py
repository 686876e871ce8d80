"""The devices are asked whether they have work. `test_verdict` has the times of whole loops."""

import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.feed import held_step

import penstock as ps
from penstock._pipeline import GetTimeout
from penstock.feed.starvation import Meter, Watch, _waiting, are_pending, pending_results

EXAMPLE = {"x": np.zeros((8, 16), np.float32)}


@pytest.fixture(autouse=True)
def _held_steps_end():
    yield
    held_step.reset()


def test_the_newest_results_come_first():
    """A look asks only some arrays, so it depends on this order, which JAX does not promise."""
    older = jnp.arange(3.0)
    newer = jnp.arange(4.0)
    arrays = jax.live_arrays()
    assert [array is newer or array is older for array in arrays[:2]] == [True, True]
    assert arrays[0] is newer


@pytest.mark.parametrize("donate", [False, True])
def test_the_results_of_a_step_are_pending_until_it_has_ended(donate):
    step, state = held_step.step(donate), held_step.new_state()
    assert pending_results(None) == []
    state, loss = step(state, EXAMPLE)
    found = pending_results(None)
    assert any(array is loss for array in found)
    assert pending_results(None, without={id(array) for array in found}) == []
    held_step.release()
    jax.block_until_ready((state, loss))
    assert pending_results(None) == []


def test_arrays_that_are_gone_or_on_the_host_are_not_pending():
    array = jnp.zeros(3)
    array.delete()
    assert not are_pending([array])
    assert not are_pending([np.zeros(3), array])


def test_a_look_while_other_threads_delete_and_donate_arrays():
    """On jaxlib 0.10, the process crashes if a deleted array is asked whether it is ready."""
    stop, add = threading.Event(), jax.jit(lambda x: x + 1, donate_argnums=0)

    def delete():
        while not stop.is_set():
            for array in [jnp.zeros(3) + number for number in range(20)]:
                array.delete()

    def donate():
        array = jnp.zeros(3)
        while not stop.is_set():
            array = add(array)

    threads = [threading.Thread(target=work) for work in (delete, donate)]
    for thread in threads:
        thread.start()
    for _ in range(3000):
        pending_results(None)
        are_pending(jax.live_arrays())
    stop.set()
    for thread in threads:
        thread.join()


def test_batches_that_wait_in_a_feed_are_no_results():
    with ps.feed([EXAMPLE] * 20, transform=lambda batch: {"x": batch["x"] + held_step.hold(batch["x"])}) as feed:
        held_step.release()
        jax.block_until_ready(next(feed))
        while not any((item := reference()) and are_pending(jax.tree.leaves(item.placed.batch)) for reference in list(_waiting)):
            pass  # until the feed has placed the next one
        assert pending_results(None) == []
        held_step.release(19)
        jax.block_until_ready(list(feed))


def test_a_watch_notes_when_each_group_is_computed():
    step, state = held_step.step(), held_step.new_state()
    state, first = step(state, EXAMPLE)
    state, second = step(state, EXAMPLE)
    found = []
    watch = Watch([[first], [second], []], lambda *times: found.append(times))
    held_step.release()
    jax.block_until_ready(first)
    threading.Event().wait(0.05)  # until it has seen the first: one poll may see both
    assert not watch.ended
    held_step.release()
    watch.wait()
    ((at_first, at_second, at_nothing),) = found
    assert at_nothing == 0.0
    assert at_second > at_first > 0.0


def test_a_watch_knows_nothing_about_arrays_that_were_deleted():
    state, loss = held_step.step()(held_step.new_state(), EXAMPLE)
    found = []
    watch = Watch([[loss]], lambda *times: found.append(times))
    loss.delete()
    watch.wait()
    assert found == []
    held_step.release()
    jax.block_until_ready(state)


def test_a_wait_is_looked_at_once_and_one_that_does_not_block_is_not(monkeypatch):
    """The device is idle, so all of the wait after the look is starving."""
    looks = []
    monkeypatch.setattr("penstock.feed.starvation.pending_results", lambda *args: looks.append(1) or [])
    meter, there = Meter(), threading.Event()

    def get(timeout):
        if timeout == 0.0 and not there.is_set():
            raise GetTimeout
        there.wait(0.01)
        return 0

    for number in range(3):
        meter.take(get, None)
        meter.hand_over(None, 0.0)
        assert len(looks) == (1 if number else 0)
        there.set()
        if not number:
            there.clear()
    assert 0.01 <= meter.starved(0.0).seconds <= meter.wait


def test_a_wait_that_lasts_is_looked_at_soon_after_another_look():
    """The first call of `get` gives up, as it does for a long wait; the device is idle then."""
    meter = Meter()
    meter.take(lambda timeout: 0, None)
    meter.hand_over(None, 0.0)
    meter._next_look = math.inf
    calls = []

    def get(timeout):
        calls.append(timeout)
        threading.Event().wait(0.01)
        if len(calls) == 1:
            raise GetTimeout
        return 0

    meter.take(get, None)
    meter.hand_over(None, 0.0)
    assert len(calls) == 2
    assert 0.01 <= meter.starved(0.0).seconds <= meter.wait


def test_a_batch_that_get_makes_itself_has_a_look_before(monkeypatch):
    """There is no moment to look while `get` makes it."""
    monkeypatch.setattr("penstock.feed.starvation._FIRST_INTERVAL", 0.0)
    monkeypatch.setattr("penstock.feed.starvation._INTERVAL_PER_COST", 0.0)
    meter = Meter()
    for _ in range(4):
        meter.take(lambda timeout: threading.Event().wait(2e-3), None)
        meter.hand_over(None, 0.0)
    assert meter.wait > 5e-3
    assert meter.starved(0.0).seconds > 3e-3  # all of them, as the device is idle


def test_a_loop_over_another_feed_counts_what_that_one_starved(monkeypatch):
    """It looks at no wait itself, and its time begins with its first batch all the same."""
    inner = Meter()
    inner._last_at = 1.0
    monkeypatch.setattr("penstock.feed.starvation.pending_results", lambda *args: pytest.fail("it looked"))
    meter = Meter(inner=inner)
    for _ in range(3):
        meter.take(lambda timeout: threading.Event().wait(2e-3), None)
        meter.hand_over(None, 0.0)
        inner._starved += 1e-3
    assert 4e-3 <= meter.seconds < 60
    assert meter.starved(0.0).seconds == pytest.approx(3e-3)


def test_the_end_is_reached_once_and_without_steps_too():
    meter = Meter()
    meter.end()
    meter.end()
    meter.settle()
    assert meter.settled
    assert meter.seconds == 0.0


def test_statistics_in_the_middle_do_not_wait_for_the_device():
    step, state = held_step.step(), held_step.new_state()
    with ps.feed([EXAMPLE] * 10) as feed:
        for _ in range(2):
            state, loss = step(state, next(feed))
        feed.stats()
        assert not loss.is_ready()
        held_step.release(2)


def test_statistics_at_the_end_wait_for_the_last_step():
    step, state = held_step.step(), held_step.new_state()
    feed, told = ps.feed([EXAMPLE] * 2), []
    for batch in feed:
        state, loss = step(state, batch)
    thread = threading.Thread(target=lambda: told.append((feed.stats(), loss.is_ready())))
    thread.start()
    held_step.release(2)
    thread.join()
    ((stats, was_ready),) = told
    assert was_ready
    assert stats.steps == 2


def test_a_timeout_still_ends_a_wait_that_is_looked_at():
    step, state = held_step.step(), held_step.new_state()
    released = threading.Event()

    def batches():
        yield EXAMPLE
        released.wait()
        yield EXAMPLE

    with ps.feed(batches(), timeout=0.01) as feed:
        state, _ = step(state, next(feed))
        for _ in range(3):
            with pytest.raises(TimeoutError):
                next(feed)
        released.set()
        held_step.release()
