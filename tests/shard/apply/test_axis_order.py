"""Axes that move between dimensions are exchanged without permutes, and without gathering the array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock.shard.mesh.hardware import Hardware

CHEAP_LINKS = Hardware("made up", {"float32": 1e9}, 1 << 30, 1e9, 1e12, 1e-9, "")


@pytest.mark.parametrize(
    ("shape", "mesh"),
    [
        ((4096, 4096), {"a": 2, "b": 4}),
        ((4, 2, 4096), {"a": 2, "b": 4}),  # axes of the last dimension go to two others
        ((2, 4, 4096), {"a": 2, "b": 4}),
        pytest.param((4096, 4096), {"a": 2, "b": 2, "c": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_axes_are_exchanged_by_all_to_alls(shape, mesh):
    def step(x):
        by_rows = jnp.sort(x, axis=-1)
        by_columns = jnp.sort(jnp.sin(by_rows).reshape(-1, x.shape[-1]), axis=0).reshape(x.shape)
        return jnp.sort(jnp.sin(by_columns), axis=-1)

    x = jax.ShapeDtypeStruct(shape, np.float32)
    plan = ps.plan(step, x, mesh=mesh, roles={"x": "other"}, hardware=CHEAP_LINKS, check=False)
    measured = plan.verify().measured
    assert {each.kind for each in measured.collectives} == {"all-to-all"}
    assert measured.bytes_on_wire == pytest.approx(plan.cost.bytes_on_wire)
