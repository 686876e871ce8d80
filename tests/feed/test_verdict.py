"""The verdict is the one of arithmetic: sources, transforms and steps of known times, in loops of every kind."""

import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock._feed.verdict import Caller, advice
from penstock_bench.suites.feed.device_times import DeviceTimes
from penstock_bench.suites.feed.known_times import (
    ATTEMPTS,
    SlowSource,
    batches,
    difference,
    make_step,
    new_state,
    sleep_on_device,
)

pytestmark = pytest.mark.alone  # measured times are compared with known ones

STEPS = 24
COUNTED = 3  # runs, of which most need the right verdict if the first has not: a busy machine may disturb one of them
LONG, SHORT = 0.045, 0.005  # seconds of input for a batch
EXAMPLE = {"x": np.zeros((8, 16), np.float32)}
STEP = {LONG: 0.015, SHORT: 0.025}  # seconds of a step beside it: one third of the long input, five times the short one


def sleeping(seconds):
    def transform(batch):
        time.sleep(seconds)
        return batch

    return transform


def collate_slowly(seconds):
    def collate(records):
        time.sleep(seconds)
        return {"x": np.stack([record["x"] for record in records])}

    return collate


def place_slowly(seconds):
    """Return a transform on the device that runs before the call returns."""

    def transform(batch):
        shape = jax.ShapeDtypeStruct(batch["x"].shape, batch["x"].dtype)
        return {"x": jax.pure_callback(sleeping(seconds), shape, batch["x"])}

    return transform


def loader(seconds=0.0, **options):
    return ps.Loader(SlowSource(seconds), 8, **options)


SOURCES = {
    "iterate": lambda seconds: ps.feed(batches(seconds, 10 * STEPS)),
    "read": lambda seconds: ps.feed(loader(seconds)),
    "read on two workers": lambda seconds: ps.feed(loader(2 * seconds, workers=2)),
    "transform": lambda seconds: ps.feed(loader(transform=sleeping(seconds))),
    "collate": lambda seconds: ps.feed(loader(collate=collate_slowly(seconds))),
    "place": lambda seconds: ps.feed(batches(0.0, 10 * STEPS), transform=place_slowly(seconds)),
}


def run(feed, times, step, after=lambda number, loss: None):
    """Train for a number of steps, and do something with each loss. The first step compiles before the loop."""
    state = new_state()
    state, loss = step(state, EXAMPLE)
    jax.block_until_ready(state)
    times.clear()
    with feed:
        for number, batch in zip(range(STEPS), feed, strict=False):
            times.take()
            state, loss = step(state, batch)
            after(number, loss)
    return feed.stats()


def asynchronous(feed, seconds, times):
    return run(feed, times, make_step(seconds, noted=True))


def donated(feed, seconds, times):
    return run(feed, times, make_step(seconds, donate=True, noted=True))


def synchronous(feed, seconds, times):
    return run(feed, times, make_step(seconds, noted=True), lambda number, loss: float(loss))


def attempts(loop, source, seconds):
    """Yield the statistics of runs of a loop with their measured times."""
    for _ in range(ATTEMPTS):
        times = DeviceTimes()
        yield loop(SOURCES[source](seconds), STEP[seconds], times), times


@pytest.mark.parametrize("seconds", [LONG, SHORT], ids=["long", "short"])
@pytest.mark.parametrize("loop", [asynchronous, donated, synchronous])
@pytest.mark.parametrize("source", SOURCES)
def test_each_source_in_each_loop(source, loop, seconds):
    assert difference(attempts(loop, source, seconds), seconds, STEP[seconds], source.split()[0], COUNTED) == ""


def fetches_every_fifth_loss(feed, seconds, times):
    return run(feed, times, make_step(seconds, noted=True), lambda number, loss: float(loss) if number % 5 == 4 else None)


def keeps_the_losses(feed, seconds, times):
    losses = []
    return run(feed, times, make_step(seconds, noted=True), lambda number, loss: losses.append(loss))


def has_no_state(feed, seconds, times):
    step, state = make_step(seconds, noted=True), new_state()
    step(state, EXAMPLE)[1].block_until_ready()
    times.clear()
    with feed:
        for _, batch in zip(range(STEPS), feed, strict=False):
            times.take()
            out = step(state, batch)
    stats = feed.stats()
    jax.block_until_ready(out)
    return stats


def calls_python(feed, seconds, times):
    def sleep(x):
        with times.step():
            time.sleep(seconds)
        return x

    step = jax.jit(lambda batch: jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), batch["x"].sum()))
    jax.block_until_ready(step(EXAMPLE))
    times.clear()
    with feed:
        for _, batch in zip(range(STEPS), feed, strict=False):
            times.take()
            step(batch)
    return feed.stats()


def is_numpy(feed, seconds, times):
    with feed:
        for _, batch in zip(range(STEPS), feed, strict=False):
            times.take()
            with times.step():
                np.asarray(batch["x"])
                time.sleep(seconds)
    return feed.stats()


def has_many_parameters(feed, seconds, times):
    kept = [jnp.zeros(1) + number for number in range(1000)]
    stats = asynchronous(feed, seconds, times)
    del kept
    return stats


OTHER_LOOPS = [fetches_every_fifth_loss, keeps_the_losses, has_no_state, calls_python, is_numpy, has_many_parameters]


@pytest.mark.parametrize("seconds", [LONG, SHORT], ids=["long", "short"])
@pytest.mark.parametrize("loop", OTHER_LOOPS)
def test_a_loop_that(loop, seconds):
    assert difference(attempts(loop, "iterate", seconds), seconds, STEP[seconds], "iterate", COUNTED) == ""


def test_a_transform_that_the_device_still_computes_is_input():
    """The batch is handed over at once, and its transform takes twice as long as the step."""

    def transform(batch):
        return {"x": batch["x"] + sleep_on_device(batch["x"], 0.04)}

    stats = synchronous(ps.feed(batches(0.0, 10 * STEPS), transform=transform), 0.02, DeviceTimes())
    assert stats.late > stats.starved / 2
    assert "input-bound" in stats.verdict
    assert "`place`" in stats.verdict
    assert "make it cheaper" in stats.verdict


def test_a_source_that_stalls_is_input_bound_by_what_the_device_loses():
    def stalling():
        for batch in batches(0.001, 60):
            time.sleep(1.0 if batch["x"][0, 0] == 30 else 0.0)
            yield batch

    times = DeviceTimes()
    step, state = make_step(0.01, noted=True), new_state()
    jax.block_until_ready(step(state, EXAMPLE))
    times.clear()
    with ps.feed(stalling()) as feed:
        for batch in feed:
            times.take()
            state, loss = step(state, batch)
            float(loss)
    stats = feed.stats()
    # 60 steps take 0.6 s. The stall takes 1 s, of which the batches in the buffers cover little.
    assert "`iterate`" in stats.verdict
    lost = times.lost(stats.seconds)
    assert lost.least > 0.2
    assert lost.least - 0.1 < stats.starved_share < lost.most + 0.1


def test_validation_in_the_loop_is_the_loops_own_time():
    times = DeviceTimes()
    step, validate, state = make_step(0.015, noted=True), make_step(0.4, noted=True), new_state()
    jax.block_until_ready(validate(state, EXAMPLE))

    def after(number, loss):
        if number == STEPS // 2:
            times.take()
            float(validate(state, EXAMPLE)[1])

    stats = run(ps.feed(batches(LONG, 10 * STEPS)), times, step, after)
    assert sum(times.ends) - sum(times.begins) > 0.4 + 0.015 * STEPS
    lost = times.lost(stats.seconds)
    assert lost.least - 0.1 < stats.starved_share < lost.most + 0.1


def test_the_time_of_the_last_steps_counts():
    """The loop is through before the device has done a third of its steps."""
    times = DeviceTimes()
    stats = asynchronous(ps.feed([EXAMPLE] * STEPS), 0.02, times)
    assert stats.steps == STEPS
    assert STEPS * 0.02 <= stats.seconds < times.ends[-1] - times.taken[0] + 0.1
    assert stats.verdict.startswith("keeps up")


LATE = {  # seconds of the loop's own work before the step, of a step and of the source, and the share that is lost by arithmetic
    "shorter than the step": (0.015, 0.02, 0.06, 2 / 3),
    "longer than the step": (0.03, 0.01, 0.06, 1 / 2),
    "longer than the source": (0.04, 0.01, 0.02, 0.0),
}


@pytest.mark.parametrize(("own", "step_seconds", "seconds", "share"), LATE.values(), ids=LATE)
@pytest.mark.parametrize("donate", [False, True])
def test_work_of_the_loop_before_an_asynchronous_step(own, step_seconds, seconds, share, donate):
    """With input that keeps up, this work takes place while the device computes the step before."""
    lost = math.nan
    for _ in range(ATTEMPTS):
        times = DeviceTimes()
        stats, own_took = _run_with_own_work(own, seconds, make_step(step_seconds, donate, noted=True), times)
        step_took = (sum(times.ends) - sum(times.taken)) / STEPS  # with the time that it waits for a processor
        lost = 1 - max(own_took, step_took) * STEPS / stats.seconds
        if not share or abs(lost - share) < 0.1:
            break
    if share:
        assert abs(stats.starved_share - lost) < 0.1
    else:
        assert stats.verdict.startswith("keeps up")


def _run_with_own_work(own, seconds, step, times):
    """Return the statistics of a loop that sleeps before each step, and for how long it slept on average."""
    state = new_state()
    state, _ = step(state, EXAMPLE)
    jax.block_until_ready(state)
    times.clear()
    own_took = 0.0
    with ps.feed(batches(seconds, 10 * STEPS)) as feed:
        for _, batch in zip(range(STEPS), feed, strict=False):
            begin = time.perf_counter()
            time.sleep(own)
            times.take()
            own_took += times.taken[-1] - begin
            state, _ = step(state, batch)
    return feed.stats(), own_took / STEPS


def test_statistics_in_the_middle_do_not_wait_for_the_device():
    step, state = make_step(1.0), new_state()
    jax.block_until_ready(step(state, EXAMPLE))
    with ps.feed(batches(0.0, 10)) as feed:
        for _ in range(2):
            state, loss = step(state, next(feed))
        feed.stats()
        assert not loss.is_ready()
    jax.block_until_ready(state)  # so that the next test finds an idle device


def test_a_timeout_still_ends_a_wait_that_is_looked_at():
    step, state = make_step(1.0), new_state()
    jax.block_until_ready(step(state, EXAMPLE))
    with ps.feed(batches(0.3, 3), timeout=0.05) as feed:
        had, late = 0, 0
        while had < 2:
            try:
                state, _ = step(state, next(feed))
                had += 1
            except TimeoutError:
                late += 1
    assert late > 1
    jax.block_until_ready(state)


ADVICE = {
    "copies of rows": ("read", Caller("feed", "rows"), "smaller dtypes"),
    "no workers": ("read", Caller("feed", "Loader", "none"), "workers=4"),
    "threads": ("transform", Caller("feed", "Loader", "thread", 8), "more than 8 workers"),
    "processes": ("transform", Caller("feed", "Loader", "process", 2), "more than 2 processes"),
    "a DataLoader": ("iterate", Caller("feed", "torch"), "num_workers"),
    "a transform on the device": ("place", Caller("feed", transform=True), "make it cheaper"),
    "Keras arrays": ("iterate", Caller("threaded epochs", "arrays"), "keras.layers.Rescaling"),
    "a feed inside": ("iterate", Caller("pk.data", "Feed"), "own stats()"),
}


@pytest.mark.parametrize(("part", "caller", "words"), ADVICE.values(), ids=ADVICE)
def test_the_advice_is_something_that_the_caller_can_do(part, caller, words):
    assert words in advice(part, caller)


@pytest.mark.parametrize("part", ["read", "transform", "collate", "iterate", "unpack", "place"])
@pytest.mark.parametrize("kind", ["rows", "Loader", "iterable"])
def test_keras_gets_no_advice_about_arguments_that_it_does_not_have(part, kind):
    assert "feed(" not in advice(part, Caller("pk.data", kind))
    assert "feed(" not in advice(part, Caller("threaded epochs", kind))


def test_a_feed_knows_its_caller():
    feed = ps.feed(ps.Loader({"x": np.arange(64)}, 8, workers=3), transform=lambda batch: batch)
    assert feed.stats().caller == Caller("feed", "rows", "thread", 3, transform=True)
