"""The verifications of the workloads with made-up batches, and the clock of the step."""

from __future__ import annotations

import time

import jax
import numpy as np
import pytest
from bench.tests.suites.feed.one_block import one_block

from penstock_bench.model import VerificationError
from penstock_bench.suites.feed import memory, overhead, overlap, tokens


def _swapped(batches):
    batches = list(batches)
    batches[1], batches[2] = batches[2], batches[1]
    return iter(batches)


def test_overhead_fails_for_batches_out_of_order_and_for_lost_ones():
    size = overhead.Size(warm_up=5, batches=5)
    assert one_block(overhead.live(overhead._penstock_list, size)).values["overhead"] > 0
    with pytest.raises(VerificationError, match="order"):
        one_block(overhead.live(lambda host, device: _swapped(overhead._direct(host, device)), size))
    with pytest.raises(VerificationError, match="3 batches were timed, not 5"):
        one_block(overhead.live(lambda host, device: overhead._direct(host[:8], device), size))


def test_overlap_fails_for_batches_out_of_order():
    size = overlap.Size(warm_up=1, steps=4)
    with pytest.raises(VerificationError, match="order"):
        one_block(overlap.live(lambda *args: _swapped(overlap._plain(*args)), size))


def test_memory_fails_for_a_reused_buffer():
    def reusing(count, device):
        buffer = np.zeros(250_000, np.float32)
        for number in range(count):
            buffer[:] = number + (number > 5)
            yield {"x": jax.device_put(buffer.copy(), device)}

    with pytest.raises(VerificationError, match="batch 6 holds other values"):
        memory.measure(reusing, memory.Size(warm_up=2, batches=2))


def test_tokens_fail_where_a_row_is_not_its_records():
    rows, device = tokens.make_tokens(300), jax.devices()[0]
    good = rows[:128].copy()
    assert tokens.read_ids({"tokens": jax.device_put(good, device)}, rows, device, 128).tolist() == list(range(128))
    good[5, 7] += 1
    with pytest.raises(VerificationError, match="differ from its record's"):
        tokens.read_ids({"tokens": jax.device_put(good, device)}, rows, device, 128)


def test_step_does_not_end_before_its_deadline():
    for seconds in (0.0, 1e-4, 2e-3):
        deadline = time.perf_counter() + seconds
        overlap.step_until(deadline)
        assert time.perf_counter() >= deadline
