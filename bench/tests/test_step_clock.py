from __future__ import annotations

import pytest

from penstock_bench.step_clock import StepClock


class Device:
    """Runs what is queued one after the other, each for `seconds`; queueing takes `dispatch` of the host's time."""

    def __init__(self, seconds: float, dispatch: float):
        self.now = self._free_at = 0.0
        self._seconds, self._dispatch = seconds, dispatch
        self.in_flight = self.most_in_flight = 0

    def queue(self):
        self.now += self._dispatch
        self._free_at = end = max(self.now, self._free_at) + self._seconds
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

        def wait():
            self.now = max(self.now, end)
            self.in_flight -= 1

        return wait


def run(device: Device, clock: StepClock) -> int:
    steps = 0
    while clock.more():
        clock.queued(device.queue())
        steps += 1
    clock.finish()
    return steps


def test_a_step_takes_what_the_device_takes_if_queueing_hides_behind_it():
    device = Device(seconds=0.010, dispatch=0.004)
    clock = StepClock(1.0, now=lambda: device.now)
    clock.begin()
    steps = run(device, clock)
    assert clock.steps == steps
    # All steps take 10 ms, and only the first one is queued while the device waits.
    assert clock.milliseconds() == pytest.approx(10 + 4 / steps)
    assert device.most_in_flight == 2
    assert device.in_flight == 0


def test_a_step_takes_what_queueing_takes_if_the_device_waits_for_it():
    device = Device(seconds=0.001, dispatch=0.004)
    clock = StepClock(1.0, now=lambda: device.now)
    clock.begin()
    steps = run(device, clock)
    assert clock.milliseconds() == pytest.approx(4 + 1 / steps)


def test_steps_that_end_before_they_return_take_what_they_take():
    now = 0.0
    clock = StepClock(0.02, now=lambda: now)
    clock.begin()
    while clock.more():
        now += 0.007
        clock.ended()
    clock.finish()
    assert clock.milliseconds() == pytest.approx(7)
    assert clock.steps == 3


def test_long_steps_are_waited_for_one_by_one_and_one_is_enough():
    device = Device(seconds=2.0, dispatch=0.004)
    clock = StepClock(0.5, alone=True, now=lambda: device.now)
    clock.begin()
    assert run(device, clock) == 1
    assert clock.milliseconds() == pytest.approx(2004)
    assert device.most_in_flight == 1


def test_a_block_of_no_seconds_has_one_step_and_one_of_a_few_has_as_many_as_it_must():
    for least in (1, 3):
        device = Device(seconds=0.010, dispatch=0.0)
        clock = StepClock(0.0, least, now=lambda device=device: device.now)
        clock.begin()
        assert run(device, clock) == least
        assert clock.milliseconds() == pytest.approx(10)


def test_steps_whose_batches_were_made_before_the_block_are_skipped():
    device = Device(seconds=0.001, dispatch=0.0)
    clock = StepClock(0.2, skip=5, now=lambda: device.now)
    clock.begin()
    loaded = 0
    while clock.more():
        device.now += 0.001 if loaded < 5 else 0.020  # the first five are ready, the others are made at their pace
        loaded += 1
        clock.queued(device.queue())
    clock.finish()
    assert clock.steps == loaded - 6  # neither the skipped ones nor the last one, behind which none is queued
    assert clock.milliseconds() == pytest.approx(20)


def test_a_block_that_ends_early_has_no_time():
    clock = StepClock(1.0, skip=2)
    clock.begin()
    clock.ended()
    with pytest.raises(ValueError, match="no step was timed, of 1 that ended"):
        clock.milliseconds()
