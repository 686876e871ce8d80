"""Check the batches of train steps."""

from __future__ import annotations

import jax
import numpy as np

from penstock_bench.suites.shard.zoo import Model


def two_batches(model: Model) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the leaves of the batches of two seeds, and assert that a seed gives one batch, which 8 devices divide."""
    first, again, other = (jax.tree.leaves(model.batch(seed)) for seed in (0, 0, 1))
    assert all(isinstance(leaf, np.ndarray) and leaf.dtype in (np.float32, np.int32) for leaf in first)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(len(leaf) % 8 == 0 for leaf in first)
    return first, other
