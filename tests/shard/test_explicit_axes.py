"""A mesh with explicit axes is planned and used as one with automatic axes, inside and outside of `jax.set_mesh`."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.shard.assertions import assert_close, assert_laid_out
from tests.shard.eager import like, planned
from tests.shard.example import CONSTRAINTS
from tests.shard.steps import mlp, mlp_step, rows

import penstock as ps

EXPLICIT = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
CONTEXTS = {"outside": contextlib.nullcontext, "inside": lambda: jax.set_mesh(EXPLICIT)}


@pytest.fixture(scope="module")
def plan():
    return planned(mlp_step, mlp(), rows(), mesh=EXPLICIT, constraints=CONSTRAINTS)


@pytest.fixture(scope="module")
def expected():
    """Return the results on one device."""
    return jax.device_get(jax.jit(mlp_step)(mlp(), rows()))


MESHES = {"explicit": EXPLICIT, "sizes": {"data": 2, "model": 4}, "searched": None}
QUICK = (("explicit", "outside", "inside"), ("sizes", "inside", "outside"), ("searched", "inside", "inside"))


@pytest.mark.parametrize(
    ("given", "planning", "running"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow)
        for each in itertools.product(MESHES, CONTEXTS, CONTEXTS)
    ],
)
def test_a_step_is_planned_and_run(given, planning, running, expected):
    mesh = MESHES[given]
    constraints = {"batch/*": P("data")} if mesh is None else CONSTRAINTS
    with CONTEXTS[planning]():
        plan = planned(mlp_step, like(mlp()), like(rows()), mesh=mesh, constraints=constraints)
        assert plan.verify().measured.memory > 0
    with CONTEXTS[running]():
        state, batch = plan.put(mlp()), plan.put(rows())
        assert_laid_out((state, batch), plan.shardings)
        after, loss = plan.jit(mlp_step, donate_argnums=0)(state, batch)
        assert_laid_out((after, loss), plan.out_shardings)
        assert_close((after, loss), expected)
        assert_laid_out(plan.init(mlp), plan.shardings[0])


@pytest.mark.parametrize("running", ["outside", pytest.param("inside", marks=pytest.mark.slow)])
def test_arrays_on_a_mesh_with_explicit_axes_are_taken(running, plan, expected):
    shardings = jax.tree.map(lambda planned: NamedSharding(EXPLICIT, planned.spec), plan.shardings)
    state, batch = jax.device_put((mlp(), rows()), shardings)
    train = plan.jit(mlp_step)
    with CONTEXTS[running]():
        for _ in range(2):
            assert_close(train(state, batch), expected)
        assert_close(plan.put(state), mlp())
        with ps.feed([jax.tree.map(np.asarray, rows())], to=plan) as batches:
            after, _ = train(state, next(batches))
        assert_laid_out(after, plan.shardings[0])
        compiled = train.lower(state, batch).compile()
    jax.tree.map(lambda leaf, wanted: leaf == wanted or pytest.fail(str(leaf)), compiled.output_shardings, plan.out_shardings)
    plan.jit(mlp_step, donate_argnums=0)(state, batch)
    assert jax.tree.all(jax.tree.map(lambda leaf: leaf.is_deleted(), state))


def test_results_are_on_the_mesh_that_is_set(plan, expected):
    with jax.set_mesh(EXPLICIT):
        state, loss = plan.jit(mlp_step)(plan.put(mlp()), plan.put(rows()))
        assert loss.sharding.mesh == EXPLICIT
        assert_close((jnp.tanh(state["in"]), loss + 1.0), (np.tanh(expected[0]["in"]), expected[1] + 1.0))
    state, loss = plan.jit(mlp_step)(plan.put(mlp()), plan.put(rows()))
    assert (state["in"].sharding, loss.sharding) == (plan.out_shardings[0]["in"], plan.out_shardings[1])


@pytest.mark.parametrize("transform", [None, lambda batch: {"x": batch["x"] * 2.0, "y": batch["y"], "mask": batch["mask"]}])
def test_a_feed_gives_batches_on_the_mesh_that_is_set_where_it_is_created(transform, plan):
    records = jax.tree.map(np.asarray, rows())
    loader = ps.Loader(records, batch_size=len(records["x"]), epochs=1, remainder="pad")
    with jax.set_mesh(EXPLICIT):
        with ps.feed(loader, to=plan, transform=transform) as batches:
            batch = next(batches)
        assert {leaf.sharding.mesh for leaf in jax.tree.leaves(batch)} == {EXPLICIT}
        assert (batch["x"] * batch["mask"][:, None] + plan.put(rows())["x"]).shape == records["x"].shape
        assert batch["mask"].sum() == len(records["x"])
        inside = ps.feed(loader, to=plan)
    with inside, ps.feed(loader, to=plan) as outside:
        assert next(inside)["x"].sharding.mesh == EXPLICIT
        assert next(outside)["x"].sharding == plan.batch_shardings["x"]


@pytest.mark.parametrize(
    ("prescribe", "said"),
    [
        (lambda x: jax.sharding.reshard(x, P("data", "model")), "in reshard at "),
        (lambda x: jnp.einsum("bf,bg->fg", x, x, out_sharding=P("data", "model")), "in einsum at "),
        (lambda x: x.at[jnp.arange(8)].get(out_sharding=P("data", "model")), "in .get at "),
        (lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(EXPLICIT, P("data"))), "in with_sharding_constraint"),
        (lambda x: jnp.tanh(jax.sharding.reshard(x, NamedSharding(EXPLICIT, P("data", "model")))), ""),
    ],
    ids=["reshard", "einsum", "get", "constraint", "named"],
)
def test_a_step_that_prescribes_layouts_of_explicit_axes_is_refused_with_the_way_out(prescribe, said):
    with jax.set_mesh(EXPLICIT), pytest.raises(ValueError, match="the step prescribes a layout of explicit axes") as refused:
        planned(lambda w, x: (w, (prescribe(x @ w) ** 2).mean()), jnp.ones((8, 8)), jnp.ones((64, 8)), mesh=EXPLICIT)
    message = str(refused.value)
    assert said in message
    assert "with_sharding_constraint with a PartitionSpec, or by constraints=" in message
    assert "\n" not in message


def test_a_constraint_with_a_partition_spec_is_kept_under_explicit_axes():
    def step(w, x):
        return w, (jax.lax.with_sharding_constraint(x @ w, P("data", "model")) ** 2).mean()

    with jax.set_mesh(EXPLICIT):
        plan = planned(step, jnp.ones((8, 8)), jnp.ones((64, 8)), mesh=EXPLICIT)
        assert_close(plan.jit(step)(plan.put(jnp.ones((8, 8))), plan.put(jnp.ones((64, 8))))[1], 64.0)


def test_other_errors_of_a_step_are_its_own():
    def step(w, x):
        raise ValueError("the step is wrong")

    with jax.set_mesh(EXPLICIT), pytest.raises(ValueError, match=r"^the step is wrong"):
        planned(step, jnp.ones((8, 8)), jnp.ones((64, 8)), mesh=EXPLICIT)


def test_a_planned_step_inside_of_a_jitted_function_says_that_explicit_axes_cannot_be(plan):
    batch = jax.device_put(rows(), NamedSharding(EXPLICIT, P("data")))
    with jax.set_mesh(EXPLICIT), pytest.raises(ValueError, match=r"used inside of jax\.jit or scan, .* explicit axes"):
        jax.jit(plan.jit(mlp_step))(mlp(), batch)
