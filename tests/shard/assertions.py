"""Assertions on the values and the shardings of trees of arrays."""

import jax
import numpy as np


def assert_close(one, other, tolerance=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), tolerance, tolerance),
        jax.device_get(one),
        jax.device_get(other),
    )


def assert_laid_out(tree, shardings):
    jax.tree.map(_assert_laid_out, tree, shardings)


def _assert_laid_out(leaf, wanted):
    assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), (leaf.sharding, wanted)
