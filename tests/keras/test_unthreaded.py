"""Batches that are slow by themselves are told from those that wait while other programs use the processor."""

import os
import subprocess
import sys
import time

import pytest

from penstock.feed.sampling import Sampling
from penstock.feed.starvation import Meter
from penstock.keras import _unthreaded
from penstock.keras._unthreaded import UnthreadedReader

BATCHES = 12


def slow_in_a_row(read):
    reader = UnthreadedReader()
    for _ in range(BATCHES):
        reader.read(read)
    assert reader.steps == BATCHES
    return reader.slow_in_a_row


def compute():
    end = time.thread_time() + 1e-3
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize("read", [compute, lambda: time.sleep(1e-3)])
def test_a_batch_that_needs_the_processor_or_waits_is_slow(read):
    assert slow_in_a_row(read) == BATCHES


def test_a_quick_batch_is_not_slow():
    assert slow_in_a_row(lambda: None) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell why a thread has waited")
def test_a_batch_is_not_slow_because_another_program_uses_the_processor():
    """Reading gives the only processor away each time, to a program that never does."""

    def wait_for_the_other():
        begin = time.perf_counter()
        while time.perf_counter() - begin < 1e-3:  # the system does not give way at each call
            os.sched_yield()

    before = os.sched_getaffinity(0)
    cpu = min(before)
    code = f"import os; os.sched_setaffinity(0, [{cpu}]); print(flush=True)\nwhile True: pass"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        os.sched_setaffinity(0, [cpu])
        begin = time.perf_counter()
        assert slow_in_a_row(wait_for_the_other) < BATCHES / 2  # one now and then waits for a thread of the tests
        assert time.perf_counter() - begin > BATCHES * 1e-3  # it did wait
    finally:
        os.sched_setaffinity(0, before)
        other.kill()
        other.communicate()


@pytest.mark.parametrize(("batches", "long_enough", "needs"), [(8, 10e-3, True), (8, 10.0, False), (7, 1e-3, False)])
def test_a_thread_pays_off_after_many_slow_batches_that_took_long_together(batches, long_enough, needs, monkeypatch):
    monkeypatch.setattr(_unthreaded, "_LONG_ENOUGH", long_enough)
    reader = UnthreadedReader()
    for _ in range(batches):
        reader.read(lambda: time.sleep(2e-3))
    assert reader.needs_a_thread == needs


def test_an_error_and_the_end_are_passed_on_and_not_counted():
    reader = UnthreadedReader()
    batches = iter([1, 2])
    assert [reader.read(batches.__next__), reader.read(batches.__next__)] == [1, 2]
    with pytest.raises(StopIteration):
        reader.read(batches.__next__)
    assert reader.steps == 2


@pytest.mark.parametrize("sampling", [Sampling, lambda: Sampling(0.0, 0.0)], ids=["with looks", "without"])
def test_reading_a_batch_counts_as_taking_it_and_handing_it_over(sampling):
    reader, in_parts = UnthreadedReader(sampling()), Meter(sampling(), makes_batches=True)
    for _ in range(20):
        assert reader.read(lambda: 7) == 7
        assert in_parts.take(lambda timeout: 7, None) == 7
        in_parts.hand_over(None, 0.0)
    assert reader.steps == in_parts.steps == 20
    for meter in (reader, in_parts):
        assert 0 < meter.wait < meter.seconds
        assert meter.startup > 0
