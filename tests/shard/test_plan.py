"""Plans from one end to the other: steps of all forms train on a mesh as they do on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.shard.steps import STEPS, prime_sizes

import penstock as ps
from penstock.shard.hardware import Hardware

# Arithmetic is dear and links are cheap, so that small steps are sharded wherever they can be.
EAGER = Hardware("eager", {"float32": 1e6, "bfloat16": 1e6}, 1 << 30, 1e6, 1e12, 1e-12, "made up")
MESHES = ({"data": 8}, {"data": 2, "model": 4}, {"data": 2, "fsdp": 2, "model": 2})
planned = functools.partial(ps.plan, hardware=EAGER, check=False)


def like(tree):
    """Its shapes alone."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def sharded(plan):
    """Whether any of the computing is divided over the devices."""
    return any(parts["idle"] < 0.99 for parts in plan.axis_work.values())


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


def comparable(tree):
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf, tree)


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_a_plan_trains_like_one_device(make):
    step, state, batch = make()
    plan = planned(step, *state, batch, mesh=MESHES[STEPS.index(make) % 3])
    if make is not prime_sizes:
        assert sharded(plan)
    alone, together = jax.jit(step), plan.jit(step)
    ours, theirs = state, state
    for _ in range(3):
        *theirs, expected = alone(*theirs, batch)
        *ours, found = together(*ours, batch)
        assert_close(found, expected)
    assert_close(comparable(ours), comparable(theirs))
    assert_laid_out(tuple(ours), plan.shardings[: len(state)])
