"""A plan is checked, compiled and run on its own devices, whatever mesh surrounds it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P
from tests.shard.assertions import assert_close, assert_laid_out
from tests.shard.eager import like
from tests.shard.limits import AT_HAND
from tests.shard.steps import mlp, mlp_step, rows

import penstock as ps

planned = functools.partial(ps.plan, hardware=AT_HAND, check=False)


def mesh_of(count, kind, name="data"):
    return Mesh(np.array(jax.devices()[:count]), (name,), axis_types=(kind,))


SURROUNDING = {
    "automatic": lambda: jax.set_mesh(mesh_of(8, AxisType.Auto)),
    "explicit": lambda: jax.set_mesh(mesh_of(8, AxisType.Explicit)),
    "smaller": lambda: jax.set_mesh(mesh_of(2, AxisType.Explicit)),
    "abstract": lambda: jax.sharding.use_abstract_mesh(mesh_of(8, AxisType.Auto).abstract_mesh),
    "old": lambda: mesh_of(8, AxisType.Auto),
}
pytestmark = pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")


GIVEN = {
    "sizes": {"mesh": {"x": 4}},
    "number": {"devices": 4},
    "devices": {"devices": jax.devices()[4:6]},
    "abstract": {"mesh": AbstractMesh((2, 2), ("x", "y"))},
    "mesh": {"mesh": mesh_of(4, AxisType.Explicit, "x")},
}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *(("automatic", "sizes"), ("explicit", "number"), ("smaller", "devices"), ("abstract", "abstract"), ("explicit", "mesh")),
        *(pytest.param("old", given, marks=pytest.mark.slow) for given in GIVEN),
    ],
)
def test_a_plan_for_other_devices_is_compiled_and_run(name, given):
    expected = jax.device_get(jax.jit(mlp_step)(mlp(), rows()))
    with SURROUNDING[name]():
        plan = planned(mlp_step, like(mlp()), like(rows()), **GIVEN[given])
        assert plan.verify().measured.memory > 0
        assert_laid_out(plan.init(mlp), plan.shardings[0])
        train = plan.jit(mlp_step, donate_argnums=0)
        assert train.lower(like(mlp()), like(rows())).compile() is not None
        assert_close(train(plan.put(mlp()), plan.put(rows())), expected)


@pytest.mark.parametrize("name", ["automatic", pytest.param("explicit", marks=pytest.mark.slow)])
def test_a_plan_for_more_devices_than_are_here_is_compiled(name):
    with SURROUNDING[name]():
        assert planned(mlp_step, like(mlp()), like(rows()), mesh={"x": 16}).verify().measured.memory > 0


def test_a_plan_near_its_limit_is_checked():
    outside = planned(mlp_step, like(mlp()), like(rows()), mesh={"x": 4})
    with SURROUNDING["automatic"]():
        plan = planned(
            mlp_step, like(mlp()), like(rows()), mesh={"x": 4}, memory=int(1.2 * outside.verify().measured.memory), check=None
        )
    assert plan.checked is not None


@pytest.mark.parametrize("name", ["automatic", "explicit"])
def test_a_step_may_name_the_axes_of_the_surrounding_mesh(name):
    def step(w, x):
        return w, (jax.lax.with_sharding_constraint(x @ w, P("data")) ** 2).mean()

    with SURROUNDING[name]():
        plan = planned(step, jnp.ones((8, 8)), jnp.ones((64, 8)), mesh={"data": 8})
        other = planned(step, jnp.ones((8, 8)), jnp.ones((64, 8)), mesh={"data": 8}, devices=jax.devices()[::-1])
        for each in (plan, other):
            assert each.verify().measured.memory > 0
            assert_close(each.jit(step)(each.put(jnp.ones((8, 8))), each.put(jnp.ones((64, 8))))[1], 64.0)
