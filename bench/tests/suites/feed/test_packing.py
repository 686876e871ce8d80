"""The verifications of the workloads of packs and windows."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from penstock_bench.model import VerificationError
from penstock_bench.suites.feed import packing, windows

SIZE = packing.Size(documents=60, slow_documents=60, seconds=0.0, repeats=2)


@pytest.mark.parametrize("make", [packing._penstock, packing._grain])
@pytest.mark.parametrize("kind", ["best fit", "concat"])
def test_every_way_of_packing_has_all_tokens(make, kind):
    values = packing.measure(partial(make, kind), False, SIZE).values
    assert 50 < values["fullness"] <= 100
    assert min(values.values()) > 0


@pytest.mark.parametrize("change", [lambda epoch: epoch[1:], lambda epoch: [epoch[0], *epoch]], ids=["lost", "twice"])
def test_a_lost_or_repeated_batch_fails(change):
    def make(tokens, offsets, device):
        epoch = packing._penstock("best fit", tokens, offsets, device)
        return lambda: iter(change(list(epoch())))

    with pytest.raises(VerificationError, match="an epoch holds"):
        packing.measure(make, False, SIZE)


def test_steps_are_compared():
    assert packing.measure_steps(SIZE).values["ratio"] > 0


def test_a_window_that_is_not_consecutive_fails():
    batch = np.resize(np.arange(windows._PERIOD, dtype=np.uint16), (32, 1025))
    windows._check(batch)
    batch[3, 5] = 0
    with pytest.raises(VerificationError, match="consecutive"):
        windows._check(batch)
