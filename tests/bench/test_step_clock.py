from __future__ import annotations

import pytest

from penstock.bench.step_clock import StepClock, milliseconds


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
    clock = StepClock(5, 5, 0, now=lambda: device.now)
    assert run(device, clock) == 7  # the first and the last are not timed
    assert milliseconds(clock.ends) == pytest.approx([10] * 5)
    assert clock.ends == sorted(set(clock.ends))
    assert device.most_in_flight == 2
    assert device.in_flight == 0


def test_a_step_takes_what_queueing_takes_if_the_device_waits_for_it():
    device = Device(seconds=0.001, dispatch=0.004)
    clock = StepClock(5, 5, 0, now=lambda: device.now)
    run(device, clock)
    assert milliseconds(clock.ends) == pytest.approx([4] * 5)


def test_steps_that_end_before_they_return_take_what_they_take():
    now = 0.0
    clock = StepClock(4, 4, 0, now=lambda: now)
    while clock.more():
        now += 0.007
        clock.ended()
    clock.finish()
    assert milliseconds(clock.ends) == pytest.approx([7] * 4)


def test_long_steps_are_waited_for_one_by_one_and_all_are_timed():
    device = Device(seconds=2.0, dispatch=0.004)
    clock = StepClock(3, 3, 0, alone=True, now=lambda: device.now)
    clock.begin()
    assert run(device, clock) == 3
    assert milliseconds(clock.ends) == pytest.approx([2004] * 3)
    assert device.most_in_flight == 1


@pytest.mark.parametrize(("seconds", "steps"), [(0.0, 3), (0.045, 5), (100.0, 20)])
def test_steps_are_timed_for_so_many_seconds_but_neither_too_few_nor_too_many(seconds, steps):
    device = Device(seconds=0.010, dispatch=0.0)
    clock = StepClock(3, 20, seconds, now=lambda: device.now)
    run(device, clock)
    assert len(milliseconds(clock.ends)) == steps
