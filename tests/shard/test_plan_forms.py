"""Steps, arguments and meshes of all forms are planned; sharding constraints of the step itself are kept."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.shard.assertions import assert_close, assert_laid_out
from tests.shard.eager import MESHES, like, matches_one_device, planned, sharded
from tests.shard.steps import STEPS, array, mlp, mlp_loss, mlp_step, rows, sgd

import penstock as ps

SMALL = {"data": 2}


def test_results_in_a_dict_are_state_and_the_rest():
    def step(state, batch):
        new, loss = mlp_step(state, batch)
        return {"state": new, "loss": loss, "more": {"norm": jnp.sum(new["in"] ** 2)}}

    plan = planned(step, mlp(), rows(), mesh=SMALL)
    assert [plan.outputs[place].path for place in sorted(plan.state)] == ["state/bias", "state/in", "state/out"]
    assert matches_one_device(plan, step, mlp(), rows())


def test_frozen_state_comes_back_as_it_went_in():
    def step(params, frozen, batch):
        loss, gradients = jax.value_and_grad(mlp_loss)(params, {**batch, "x": batch["x"] @ frozen})
        return sgd(params, gradients), frozen, loss

    args = (mlp(), array(16, 16), rows())
    plan = planned(step, *args, mesh={"data": 2, "model": 2}, constraints={"frozen": P("model", "data")})
    results = plan.jit(step)(*args)
    assert_laid_out(results[1], plan.shardings[1])
    np.testing.assert_array_equal(results[1], args[1])
    assert_close(results, jax.jit(step)(*args))


def test_swapped_arguments_get_the_layout_of_their_position():
    def step(a, b):
        return b, a

    a, b = array(16, 16), array(16, 16, seed=1)
    plan = planned(step, a, b, mesh=MESHES[1], constraints={"a": P("data"), "b": P(None, "model")})
    first, second = plan.jit(step)(a, b)
    assert_laid_out((first, second), plan.shardings)
    np.testing.assert_array_equal(first, b)


@pytest.mark.parametrize("form", ["one", "none of them used", "nothing at all", "no operation"])
def test_almost_empty_steps_are_planned(form):
    step, args = {
        "one": (lambda x: x * 2.0, (array(8, 8),)),
        "none of them used": (lambda x, y: (jnp.ones(3), None, 4.0), (array(8, 8), {})),
        "nothing at all": (lambda: jnp.ones(3), ()),
        "no operation": (lambda x: x, (array(8, 8),)),
    }[form]
    plan = planned(step, *args, mesh=MESHES[0])
    assert matches_one_device(plan, step, *args)


def test_a_forward_pass_without_state_is_planned():
    def forward(params, x):
        return jax.nn.relu(x @ params["in"]) @ params["out"]

    plan = planned(forward, mlp(), rows()["x"], mesh=MESHES[1])
    assert sharded(plan)
    assert matches_one_device(plan, forward, mlp(), rows()["x"])


def test_a_planned_loss_can_be_differentiated():
    plan = planned(mlp_loss, mlp(), rows(), mesh=SMALL)
    assert_close(jax.grad(plan.jit(mlp_loss))(mlp(), rows()), jax.jit(jax.grad(mlp_loss))(mlp(), rows()))


def test_a_planned_step_runs_inside_of_a_loop():
    plan = planned(mlp_step, mlp(), rows(), mesh=SMALL)
    step = plan.jit(mlp_step)
    _, losses = lax.scan(lambda state, _: step(state, rows()), plan.put(mlp()), None, length=2)
    _, expected = lax.scan(lambda state, _: mlp_step(state, rows()), mlp(), None, length=2)
    assert_close(losses, expected)


def test_bfloat16_parameters_keep_their_dtype_and_train_the_same():
    def step(params, batch):
        loss, gradients = jax.value_and_grad(mlp_loss)(params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), batch))
        return sgd(params, gradients), loss.astype(jnp.float32)

    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), mlp())
    plan = planned(step, params, rows(), mesh=SMALL)
    after, loss = plan.jit(step)(params, rows())
    assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {jnp.dtype("bfloat16")}
    assert_close(loss, jax.jit(step)(params, rows())[1], 0.02)


def test_64_bit_numpy_arrays_are_planned_with_the_dtype_that_jax_gives_them():
    batch = jax.tree.map(lambda x: np.asarray(x, np.float64), rows())
    plan = planned(mlp_step, mlp(), batch, mesh=SMALL, constraints={"batch/*": P()})
    assert {leaf.dtype for leaf in plan.inputs} == {"float32"}
    assert plan.cost.memory.batch == sum(leaf.nbytes for leaf in jax.tree.leaves(rows()))
    assert_close(plan.jit(mlp_step)(mlp(), batch), jax.jit(mlp_step)(mlp(), rows()))
    assert_close(plan.put(batch), rows())


def any_arguments(*args):
    return mlp_step(*args)


def test_methods_partials_and_functions_of_any_arguments_are_steps():
    class Trainer:
        def step(self, params, batch):
            return mlp_step(params, batch)

    expected = jax.jit(mlp_step)(mlp(), rows())
    for step, first in (
        (Trainer().step, "params/bias"),
        (functools.partial(mlp_step), "params/bias"),
        (any_arguments, "0/bias"),
    ):
        plan = planned(step, mlp(), rows(), mesh=SMALL)
        assert plan.inputs[0].path == first
        assert_close(plan.jit(step)(mlp(), rows()), expected)


def auto_mesh(names=("data", "model")):
    return jax.make_mesh((2, 4), names, axis_types=(AxisType.Auto,) * 2)


def test_a_mesh_is_accepted_in_every_form():
    forms = (
        auto_mesh(),
        AbstractMesh((2, 4), ("data", "model")),
        {"data": 2, "model": np.int64(4)},
        jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2),
    )
    expected = planned(mlp_step, mlp(), rows(), mesh=MESHES[1])
    assert expected.mesh_shape == {"data": 2, "model": 4}
    for mesh in forms:
        plan = planned(mlp_step, mlp(), rows(), mesh=mesh)
        assert (plan, plan.mesh, plan.shardings) == (expected, expected.mesh, expected.shardings)
    assert matches_one_device(plan, mlp_step, mlp(), rows())


def test_the_step_runs_on_the_given_devices():
    devices = jax.devices()[6:]
    for choice in ({"mesh": Mesh(np.array(devices), ("data",))}, {"devices": devices}):
        plan = planned(mlp_step, mlp(), rows(), **choice)
        _, loss = plan.jit(mlp_step)(mlp(), rows())
        assert loss.devices() == set(devices)


@pytest.mark.filterwarnings("ignore:the batch of")  # of 12 rows does not divide over 8 devices
@pytest.mark.parametrize("count", [1, 6])
def test_without_a_mesh_its_shape_is_found(count):
    plan = planned(mlp_step, mlp(), rows(12), devices=count)
    assert np.prod(list(plan.mesh_shape.values())) == count
    assert count > 1 or plan.cost.collectives == ()
    assert matches_one_device(plan, mlp_step, mlp(), rows(12))


def test_a_mesh_axis_of_size_one_costs_nothing():
    one, two = (planned(mlp_step, mlp(), rows(), mesh=mesh) for mesh in ({"data": 8}, {"data": 8, "model": 1}))
    assert two.cost.seconds == pytest.approx(one.cost.seconds)
    assert all(each.axes == ("data",) for each in two.cost.collectives)


def test_a_plan_for_more_devices_than_are_present_does_not_run():
    plan = planned(mlp_step, mlp(), rows(64), mesh={"data": 64})
    assert isinstance(plan.mesh, AbstractMesh)
    assert "64" in str(plan)
    for use in (lambda: plan.jit(mlp_step), lambda: plan.put(mlp()), lambda: plan.init(mlp)):
        with pytest.raises(ValueError, match=r"the plan is for 64 devices .* this process has 8"):
            use()


def test_a_plan_is_made_and_compiled_from_shapes_alone():
    plan = planned(mlp_step, like(mlp()), like(rows()), mesh=SMALL)
    compiled = plan.jit(mlp_step, donate_argnums=0).lower(like(mlp()), like(rows())).compile()
    assert_close(compiled(plan.put(mlp()), plan.put(rows())), jax.jit(mlp_step)(mlp(), rows()))


def test_equal_calls_give_equal_plans():
    step, state, batch = next(make for make in STEPS if make.__name__ == "in_parts")()
    one, other = (planned(step, *state, batch, devices=4) for _ in range(2))
    assert one == other
    assert str(one) == str(other)


def with_shard_map(mesh):
    def step(params, batch):
        def loss(params):
            inner = jax.shard_map(
                lambda x, w: lax.psum(x @ w, "model"),
                mesh=mesh,
                in_specs=(P("data", "model"), P("model", None)),
                out_specs=P("data", None),
            )
            return jnp.mean((jax.nn.relu(inner(batch["x"], params["in"])) @ params["out"] - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return sgd(params, gradients), value

    return step


def with_constraint(mesh, spec):
    def step(params, batch):
        def loss(params):
            hidden = lax.with_sharding_constraint(batch["x"] @ params["in"], NamedSharding(mesh, spec))
            return jnp.mean((jax.nn.relu(hidden) @ params["out"] - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return sgd(params, gradients), value

    return step


def test_an_inner_shard_map_is_kept():
    step = with_shard_map(auto_mesh())
    plan = planned(step, mlp(), rows(), mesh=auto_mesh())
    assert matches_one_device(plan, step, mlp(), rows())
    assert "shard_map" in str(jax.make_jaxpr(plan.jit(step))(mlp(), rows()))


def test_an_inner_constraint_is_kept():
    step = with_constraint(auto_mesh(), P("model", "data"))
    plan = planned(step, mlp(), rows(), mesh=auto_mesh())
    assert "PartitionSpec('model', 'data')" in str(jax.make_jaxpr(plan.jit(step))(mlp(), rows())).replace("P(", "PartitionSpec(")


def test_the_mesh_of_the_step_is_used_for_the_plan():
    names = ("rows", "columns")
    step = with_constraint(auto_mesh(names), P(*names))
    plan = planned(step, mlp(), rows())
    assert plan.mesh_shape == {names[0]: 2, names[1]: 4}
    assert matches_one_device(plan, step, mlp(), rows())


@pytest.mark.parametrize("mesh", [{"data": 4, "model": 2}, {"x": 2, "y": 4}], ids=str)
def test_a_step_on_another_mesh_than_the_plan_is_refused(mesh):
    for step in (with_shard_map(auto_mesh()), with_constraint(auto_mesh(), P("data"))):
        with pytest.raises(ValueError, match=r"data 2 × model 4 .* mesh={'data': 2, 'model': 4}"):
            planned(step, mlp(), rows(), mesh=mesh)


def with_debugging(seen):
    """Return a step that calls back in every kind of nested program."""

    @jax.jit
    def inner(h):
        jax.debug.callback(lambda h: seen.append(("jit", h)), h)
        return h * 2.0

    def body(h, w):
        jax.debug.callback(lambda h: seen.append(("scan in checkpoint", h)), h)
        return jnp.tanh(h @ w), None

    def branch(h):
        jax.debug.callback(lambda h: seen.append(("cond", h)), h[0])
        return h + 1.0

    def step(params, batch):
        def loss(params):
            h = lax.scan(jax.checkpoint(body, policy=jax.checkpoint_policies.everything_saveable), batch["x"], params["layers"])[
                0
            ]
            h = lax.cond(h[0, 0] < 2.0, branch, lambda h: h, inner(h))
            jax.debug.callback(lambda h: seen.append(("hidden", h)), h)
            return jnp.mean((h - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        jax.debug.print("loss {value}", value=value)
        return sgd(params, gradients), value

    return step


@pytest.mark.parametrize("mesh", [SMALL, *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES)], ids=str)
def test_debugging_callbacks_are_kept(mesh, capfd):
    seen, expected = [], []
    args = ({"layers": array(3, 16, 16)}, rows())
    plan = planned(with_debugging(seen), *args, mesh=mesh, constraints={"batch/*": P("data")})
    assert not seen
    assert_close(plan.jit(with_debugging(seen))(*args), jax.jit(with_debugging(expected))(*args))
    jax.effects_barrier()
    calls, expected_calls = (collections.Counter(name for name, _ in each) for each in (seen, expected))
    assert calls == expected_calls == {"jit": 1, "cond": 1, "scan in checkpoint": 6, "hidden": 1}
    hidden, alone = (value for each in (seen, expected) for name, value in each if name == "hidden")
    assert_close(hidden, alone)
    printed = [line for line in capfd.readouterr().out.splitlines() if line.startswith("loss ")]
    assert len(printed) == 2
    assert plan.verify().measured.memory > 0


def test_debugging_changes_no_plan():
    def debugged(params, batch):
        jax.debug.callback(lambda x: None, batch["x"])
        return mlp_step(params, batch)

    with_, without = (planned(step, mlp(), rows(64), mesh=MESHES[1]) for step in (debugged, mlp_step))
    assert with_.cost == without.cost
    assert [leaf.stored for leaf in with_.inputs] == [leaf.stored for leaf in without.inputs]


@pytest.mark.slow
def test_a_pure_callback_is_kept_and_left_out_for_devices_that_are_not_present():
    """Error checks of Equinox and Diffrax are such callbacks."""

    def step(params, batch):
        def body(h, _):
            scale = jax.pure_callback(lambda h: np.float32(np.abs(h).max()), jax.ShapeDtypeStruct((), jnp.float32), h)
            return h / jnp.where(scale > 1, scale, 1), scale

        scales = lax.scan(body, batch["x"], None, length=3)[1]
        params, loss = mlp_step(params, batch)
        return params, loss + scales.sum()

    plan = planned(step, mlp(), rows(), mesh=MESHES[1])
    assert_close(plan.jit(step)(mlp(), rows()), jax.jit(step)(mlp(), rows()))
    absent = ps.plan(step, mlp(), rows(64), mesh={"data": 2 * jax.device_count()}, hardware="tpu-v5e", check=True)
    assert absent.verify().measured.memory > 0


@pytest.mark.parametrize("effect", ["print", "callback"])
def test_a_step_with_ordered_side_effects_is_refused(effect):
    def step(params, batch):
        if effect == "print":
            jax.debug.print("{}", batch["x"][0, 0], ordered=True)
        else:
            io_callback(print, None, batch["x"][0, 0], ordered=True)
        return mlp_step(params, batch)

    with pytest.raises(ValueError, match="the step has side effects"):
        planned(step, mlp(), rows(), mesh=MESHES[0])


def test_an_error_of_the_step_is_passed_on():
    class OwnError(Exception):
        pass

    def step(params, batch):
        raise OwnError("mine")

    with pytest.raises(OwnError, match="mine"):
        planned(step, mlp(), rows(), mesh=MESHES[0])


def test_a_leaf_that_is_no_array_is_named():
    with pytest.raises(TypeError, match=r"'batch/name'.* not an array: str"):
        planned(mlp_step, mlp(), {**rows(), "name": "digits"}, mesh=MESHES[0])
