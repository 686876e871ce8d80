"""The verdict is the one of arithmetic: inputs and steps of known times, in loops of every kind, on a clock of the test's own.

A `Machine` stands for the clock, the device and the input. The measurement asks it for the time and for pending results, where it
asks `time` and JAX otherwise, so no time passes, and none is measured. The benchmark's suite `verdicts` compares verdicts with
measured times on real devices, and test_starvation.py shows that looks at a real device tell whether it works.
"""

import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import penstock as ps
from penstock._pipeline import GetTimeout
from penstock.feed.starvation import Meter
from penstock.feed.stats import Caller, LaterStats, advice

STEPS = 100
LONG, SHORT = 0.045, 0.005  # seconds of input for a batch
STEP = {LONG: 0.015, SHORT: 0.025}  # seconds of a step beside it: one third of the long input, five times the short one
LOOK, CALL = 30e-6, 5e-6  # seconds of a look at the device, and of a call that has nothing to wait for
TOLERANCE = 0.04


class Result:
    """A result of a program: a batch on the device, or the state after a step."""

    nbytes = 4

    def __init__(self, ready_at):
        self.ready_at = ready_at


class Machine:
    """A clock, a device that runs one program after another, and an input that works ahead.

    Attributes:
      now: seconds on the clock.
      lost: seconds in which the device has had no step, from the first batch on.
    """

    def __init__(self, monkeypatch, seconds, late=0.0, buffer=4):
        self.now, self.lost, self._cpu = 100.0, 0.0, 0.0
        self._idle_since, self._results = None, []
        self._seconds, self._late, self._buffer = seconds, late, buffer
        self._made, self._taken = [], []  # moments of the batches
        clock = SimpleNamespace(perf_counter=lambda: self.now, thread_time=lambda: self._cpu)
        monkeypatch.setattr("penstock.feed.starvation.time", clock)
        monkeypatch.setattr("penstock.feed.starvation._random", random.Random(0))  # alone, a test would have other intervals
        monkeypatch.setattr("penstock.feed.starvation.pending_results", self._pending_results)
        monkeypatch.setattr("penstock.feed.starvation.are_pending", self._are_pending)
        monkeypatch.setattr("penstock.feed.starvation.Watch", self._watch)

    def get(self, timeout):
        """Return the next batch, when it is made."""
        number = len(self._taken)
        if len(self._made) == number:
            begin = self._made[-1] if self._made else self.now
            if number >= self._buffer:
                begin = max(begin, self._taken[number - self._buffer])
            self._made.append(begin + self._seconds(number))
        if timeout is not None and self._made[number] > self.now + timeout:
            self.now += timeout
            raise GetTimeout
        self.now = max(self.now, self._made[number]) + CALL
        self._taken.append(self.now)
        return Result(self.now + self._late)

    def run(self, batch, seconds):
        """Dispatch a step, and return its result."""
        begin = max(self.now, batch.ready_at)
        if self._idle_since is not None:
            self.lost += max(0.0, begin - self._idle_since)
            begin = max(begin, self._idle_since)
        self._idle_since = begin + seconds
        self.now += CALL
        result = Result(self._idle_since)
        self._results.append(weakref.ref(result))
        return result

    def _pending_results(self, platform, without=frozenset(), newest=8):
        self.now += LOOK
        self._cpu += LOOK
        alive = [result for reference in self._results if (result := reference()) is not None]
        return [result for result in reversed(alive) if result.ready_at > self.now and id(result) not in without][:newest]

    def _are_pending(self, results):
        return any(result.ready_at > self.now for result in results)

    def _watch(self, groups, done):
        ends = [max((result.ready_at for result in group), default=0.0) for group in groups]
        done(*[end if end > self.now else 0.0 for end in ends])
        return SimpleNamespace(ended=True, wait=lambda: None)


def no_more(timeout):
    raise StopIteration


def run(machine, step, fetch=lambda number: False, before=0.0, evaluate=lambda number: 0.0, steps=STEPS, part="read"):
    """Return the statistics of a loop.

    Args:
      step: seconds of a step.
      fetch: whether the loop waits for the loss of a step.
      before: seconds for which the loop works before each step.
      evaluate: seconds of a program that runs after a step, and for whose result the loop waits.
      part: the part of the input that takes longest.
    """
    meter, state = Meter(), None
    placing = LONG if part == "place" else CALL
    for number in range(steps):
        batch = meter.take(machine.get, None)
        meter.hand_over(batch, placing)
        machine.now += before
        state = machine.run(batch, step)
        if evaluate(number):
            state = machine.run(batch, evaluate(number))
        if fetch(number) or evaluate(number):
            machine.now = max(machine.now, state.ready_at)
    with pytest.raises(StopIteration):
        meter.take(no_more, None)
    meter.end()
    host = {"iterate" if part == "place" else part: 0.5}
    return LaterStats(meter, host, 1, placing * steps, 0, Caller())()


LOOPS = {
    "asynchronous": lambda number: False,
    "every loss fetched": lambda number: True,
    "every fifth loss fetched": lambda number: number % 5 == 4,
}


@pytest.mark.parametrize("fetch", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("part", ["read", "transform", "collate", "iterate", "place"])
def test_an_input_that_takes_three_times_as_long_as_the_step_loses_two_thirds(fetch, part, monkeypatch):
    machine = Machine(monkeypatch, lambda number: LONG)
    stats = run(machine, STEP[LONG], fetch, part=part)
    assert stats.verdict.startswith("input-bound")
    assert f"`{part}`" in stats.verdict
    assert machine.lost / stats.seconds == pytest.approx(2 / 3, abs=0.02)
    assert stats.starved_share == pytest.approx(2 / 3, abs=TOLERANCE)


@pytest.mark.parametrize("fetch", LOOPS.values(), ids=LOOPS)
def test_an_input_that_takes_a_fifth_of_the_step_keeps_up(fetch, monkeypatch):
    machine = Machine(monkeypatch, lambda number: SHORT)
    stats = run(machine, STEP[SHORT], fetch)
    assert stats.verdict.startswith("keeps up")
    assert stats.starved_share < 0.01
    assert stats.seconds == pytest.approx(STEPS * STEP[SHORT], rel=0.01)  # the time of the last steps counts


@pytest.mark.parametrize("fetch", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("seconds", [1e-3, 3e-3, 10e-3])
def test_waits_without_a_look_are_estimated(fetch, seconds, monkeypatch):
    """Looks are too far apart for each of so many short waits."""
    machine = Machine(monkeypatch, lambda number: seconds)
    looks, look = [], machine._pending_results
    monkeypatch.setattr("penstock.feed.starvation.pending_results", lambda *args: looks.append(1) or look(*args))
    stats = run(machine, seconds / 2, fetch, steps=2000)
    assert 3 < len(looks) < 1200
    assert stats.starved_share == pytest.approx(machine.lost / stats.seconds, abs=TOLERANCE)


def test_a_transform_that_the_device_still_computes_is_input(monkeypatch):
    """The batch is handed over at once, and is there only after twice the time of a step."""
    machine = Machine(monkeypatch, lambda number: 1e-3, late=0.04)
    stats = run(machine, 0.02, LOOPS["every loss fetched"], part="place")
    assert stats.late > stats.starved / 2
    assert "`place`" in stats.verdict
    assert stats.starved_share == pytest.approx(machine.lost / stats.seconds, abs=TOLERANCE)


def test_a_source_that_stalls_is_input_bound_by_what_the_device_loses(monkeypatch):
    """60 steps take 0.6 s. The stall takes 1 s, of which the batches in the buffer cover little."""
    machine = Machine(monkeypatch, lambda number: 1.0 if number == 30 else 1e-3)
    stats = run(machine, 0.01, LOOPS["every loss fetched"], steps=60, part="iterate")
    assert machine.lost > 0.9
    assert "`iterate`" in stats.verdict
    assert stats.starved_share == pytest.approx(machine.lost / stats.seconds, abs=TOLERANCE)


def test_validation_in_the_loop_is_the_loops_own_time(monkeypatch):
    machine = Machine(monkeypatch, lambda number: LONG)
    stats = run(machine, STEP[LONG], evaluate=lambda number: 0.4 if number == STEPS // 2 else 0.0)
    assert stats.starved_share == pytest.approx(machine.lost / stats.seconds, abs=TOLERANCE)


def test_a_loop_whose_own_work_takes_longest_keeps_up(monkeypatch):
    """The device has nothing to do for most of the time, but not because of the input."""
    stats = run(Machine(monkeypatch, lambda number: SHORT), 0.01, LOOPS["every loss fetched"], before=0.1)
    assert stats.verdict.startswith("keeps up")


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
