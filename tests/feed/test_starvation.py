"""The devices are asked whether they have work, and waits without a look are estimated."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.feed import held_step

import penstock as ps
from penstock._producers import GetTimeout
from penstock.feed.readiness import Watch, are_pending, pending_arrays, smallest
from penstock.feed.sampling import Sampling
from penstock.feed.starvation import Meter

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
    assert pending_arrays(None) == []
    state, loss = step(state, EXAMPLE)
    found = pending_arrays(None)
    assert any(array is loss for array in found)
    assert pending_arrays(None, without={id(array) for array in found}) == []
    held_step.release()
    jax.block_until_ready((state, loss))
    assert pending_arrays(None) == []


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
        pending_arrays(None)
        are_pending(jax.live_arrays())
    stop.set()
    for thread in threads:
        thread.join()


def test_batches_that_wait_in_a_feed_are_no_results():
    with ps.feed([EXAMPLE] * 20, transform=lambda batch: {"x": batch["x"] + held_step.hold(batch["x"])}) as feed:
        held_step.release()
        jax.block_until_ready(next(feed))
        while not pending_arrays(None):
            pass  # until the feed has placed the next one
        assert Sampling().pending(None) == []
        held_step.release(19)
        jax.block_until_ready(list(feed))


def test_a_watch_notes_when_each_group_is_computed():
    step, state = held_step.step(), held_step.new_state()
    state, first = step(state, EXAMPLE)
    state, second = step(state, EXAMPLE)
    found = []
    watch = Watch([[second], [first], []], lambda times, seconds: found.append(times))
    held_step.release()
    jax.block_until_ready(first)
    while watch._groups[1]:  # until it has seen the first: one poll may see both
        pass
    held_step.release()
    watch.wait()
    ((at_second, at_first, at_nothing),) = found
    assert at_nothing == 0.0
    assert at_second > at_first > 0.0


def test_a_watch_knows_nothing_about_arrays_that_were_deleted():
    state, loss = held_step.step()(held_step.new_state(), EXAMPLE)
    found = []
    watch = Watch([[loss]], lambda times, seconds: found.append(times))
    loss.delete()
    watch.wait()
    assert found == [None]
    held_step.release()
    jax.block_until_ready(state)


def test_the_smallest_arrays_are_kept():
    arrays = [jnp.zeros(n) for n in (5, 1, 3)]
    assert [array.size for array in smallest(arrays, 2)] == [1, 3]


SAMPLES = st.lists(st.tuples(st.floats(1e-5, 10), st.floats(0, 1)), max_size=40)


@given(SAMPLES, st.floats(1e-5, 10))
def test_an_estimated_share_lies_among_those_of_the_samples(samples, typical):
    sampling = Sampling()
    for waited, share in samples:
        sampling.add(waited, waited * share)
    shares = [share for _, share in samples[-32:]] or [0.0]
    assert min(shares) - 1e-9 <= sampling.share(typical) <= max(shares) + 1e-9


def test_very_short_samples_say_little_about_long_waits():
    sampling = Sampling()
    sampling.add(20e-3, 0.0)
    for _ in range(10):
        sampling.add(30e-6, 30e-6)
    assert sampling.share(20e-3) < 0.05


def samples(sampling, times):
    """Yield the steps that are samples, when they take these times. A `Meter` asks no sooner than the budget can allow one."""
    before, steps, until = 0.0, 0, 0.0
    for step, seconds in enumerate(times):
        steps += 1
        if before + seconds < until:
            before += seconds
            continue
        is_due = sampling.is_due(seconds, before, steps)
        before, steps, until = 0.0, 0, 0.0 if is_due else sampling.seconds_until_due
        if is_due:
            yield step


@given(st.lists(st.floats(0, 1), max_size=50) | st.lists(st.floats(0, 5e-3), max_size=500), st.floats(0, 1e-2))
def test_samples_take_no_more_than_their_share_of_the_time(times, cost):
    """Those of the beginning come on top: eight, two whose cost is not known yet, and one that uses up the budget."""
    sampling, spent = Sampling(at_once=1e-3, share=1e-2), 0.0
    for _ in samples(sampling, times):
        sampling.note_look(cost)
        sampling.spend(cost)
        spent += cost
    share = 3e-2 if max(times, default=0.0) > 5e-3 else 1e-2  # a larger one for long steps
    assert spent <= max(1e-3, 8 * cost) + share * sum(times) + 3 * cost


def test_a_pause_of_the_loop_is_not_followed_by_looks_at_quick_steps():
    """An evaluation, a save, or a stop of the process."""
    sampling, looks = Sampling(), 0
    for step in samples(sampling, [0.5 if step % 400 == 399 else 2e-4 for step in range(4000)]):
        looks += step >= 400
        sampling.note_look(1e-4)
        sampling.spend(1e-4)
    assert looks <= 20  # 0.15 % of 0.72 s are eleven; a pause of 0.5 s would allow eight more each


def test_batches_of_one_execution_that_are_asked_for_at_once_do_not_starve_the_looks():
    """As with steps_per_execution: one in 32 steps takes all the time, which is no pause."""
    sampling, looks = Sampling(), 0
    for step in samples(sampling, [32e-3 if step % 32 == 31 else 2e-5 for step in range(32 * 300)]):
        looks += step >= 32 * 100
        sampling.note_look(1e-4)
        sampling.spend(1e-4)
    assert looks >= 50  # 0.15 % of 6.5 s are 98


@settings(max_examples=40)
@given(st.lists(st.floats(1e-5, 1e-3), min_size=50, max_size=1000))
def test_no_sample_is_missed_between_two_questions(times):
    """A sampling that is asked at each step allows as many, but for what is left at the end; costs are random."""
    asked, asked_always = Sampling(share=0.1), Sampling(share=0.1)
    made = 0
    for _ in samples(asked, times):
        asked.spend(1e-4)
        made += 1
    for seconds in times:
        if asked_always.is_due(seconds):
            asked_always.spend(1e-4)
            made -= 1
    assert abs(made) <= 2


@pytest.mark.parametrize("cost", [0.1e-3, 3e-3, 15e-3])
def test_looks_that_cost_much_are_made_all_the_same(cost):
    """A process with many arrays has such looks. The first ones follow each other, so that a short run has some."""
    sampling, looks = Sampling(), []
    for step in samples(sampling, [0.1] * 10_000):
        looks.append(step)
        sampling.note_look(cost)
        sampling.spend(cost)
    assert looks[5] == 5
    assert len([step for step in looks if step >= 5000]) > 20


@pytest.mark.parametrize(("starved", "of", "is_guess"), [(0, 1, True), (1, 9, True), (2, 9, True), (3, 9, False), (1, 2, False)])
def test_an_estimate_needs_evidence(starved, of, is_guess):
    sampling = Sampling()
    for number in range(of):
        sampling.add(0.01, 0.01 if number < starved else 0.0)
    assert sampling.is_guess == is_guess


def test_what_was_seen_too_rarely_is_a_guess():
    """The devices are idle, so they starve in a wait that is looked at; the budget allows few looks."""
    jax.block_until_ready(jax.live_arrays())
    sampling = Sampling(at_once=1e-4, share=0.0)
    meter = Meter(sampling)
    meter.take(lambda timeout: 0, None)
    meter.hand_over(None, 0.0)
    for _ in range(4):
        meter.take(lambda timeout: threading.Event().wait(2e-3), None)
        meter.hand_over(None, 0.0)
    meter.end()
    assert sampling.seen < 4
    assert meter.starved(0.0).guessed == 0.0
    sampling.known += 9
    assert 0 < meter.starved(0.0).guessed < meter.starved(0.0).seconds


def test_without_a_budget_there_is_no_look(monkeypatch):
    monkeypatch.setattr("penstock.feed.sampling.pending_arrays", lambda *args: pytest.fail("it looked"))
    meter = Meter(Sampling(0.0, 0.0))
    for _ in range(5):
        meter.take(lambda timeout: threading.Event().wait(1e-3), None)
        meter.hand_over(None, 0.0)
    assert meter.wait > 0
    assert meter.starved(0.0).seconds == 0


def test_a_wait_that_is_long_is_looked_at_without_a_budget():
    """The first call of `get` gives up, as it does for a long wait; the device is idle then."""
    meter = Meter(Sampling(0.0, 0.0))
    meter.take(lambda timeout: 0, None)
    meter.hand_over(None, 0.0)
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
