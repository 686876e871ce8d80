"""Plans on made-up hardware on which small steps are sharded wherever they can be."""

import functools

import jax
from tests.shard.assertions import assert_close

import penstock as ps
from penstock.shard.mesh.hardware import Hardware

# FLOPs are slow and links are fast, so that it pays to shard even small steps.
EAGER = Hardware("eager", {"float32": 1e6, "bfloat16": 1e6}, 1 << 30, 1e6, 1e12, 1e-12, "made up")


MESHES = ({"data": 8}, {"data": 2, "model": 4}, {"data": 2, "fsdp": 2, "model": 2})


planned = functools.partial(ps.plan, hardware=EAGER, check=False)


def like(tree):
    """Return the abstract arrays of a tree."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def sharded(plan):
    """Return whether any of the compute is sharded."""
    return any(parts["idle"] < 0.99 for parts in plan.axis_work.values())


def matches_one_device(plan, step, *args):
    assert_close(plan.jit(step)(*args), jax.jit(step)(*args))
    return True
