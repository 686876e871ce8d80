"""Plans from one end to the other: steps of all forms train on a mesh as they do on one device."""

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
from tests.shard.steps import STEPS, array, mlp, mlp_loss, mlp_step, prime_sizes, rows, sgd

import penstock as ps
from penstock.shard import PlanError
from penstock.shard.mesh.hardware import Hardware

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


TIGHT = ("scanned_layers", "tied_embeddings", "attention")


@pytest.mark.parametrize("make", [make for make in STEPS if make.__name__ in TIGHT], ids=lambda make: make.__name__)
def test_a_plan_of_little_memory_computes_what_one_device_does(make):
    step, state, batch = make()
    args, mesh = (*state, batch), MESHES[2 - STEPS.index(make) % 2]
    limit = planned(step, *args, mesh=mesh).cost.memory.total
    plan = None
    while plan is None or limit > 64:
        try:
            plan = planned(step, *args, mesh=mesh, memory=limit)
        except PlanError:
            break
        limit = int(0.8 * plan.cost.memory.total)
    assert any(any(leaf.stored) for leaf in plan.inputs)
    assert matches_one_device(plan, step, *args)


def matches_one_device(plan, step, *args):
    assert_close(plan.jit(step)(*args), jax.jit(step)(*args))
    return True


# The forms that a step, its arguments and its mesh may have.


def test_results_in_a_dict_are_state_and_the_rest():
    def step(state, batch):
        new, loss = mlp_step(state, batch)
        return {"state": new, "loss": loss, "more": {"norm": jnp.sum(new["in"] ** 2)}}

    plan = planned(step, mlp(), rows(), mesh=MESHES[1])
    assert [plan.outputs[place].path for place in sorted(plan.state)] == ["state/bias", "state/in", "state/out"]
    assert matches_one_device(plan, step, mlp(), rows())


def test_frozen_state_comes_back_as_it_went_in():
    def step(params, frozen, batch):
        loss, gradients = jax.value_and_grad(mlp_loss)(params, {**batch, "x": batch["x"] @ frozen})
        return sgd(params, gradients), frozen, loss

    args = (mlp(), array(16, 16), rows())
    plan = planned(step, *args, mesh=MESHES[1], constraints={"frozen": P("model", "data")})
    _, frozen, _ = plan.jit(step)(*args)
    assert_laid_out(frozen, plan.shardings[1])
    np.testing.assert_array_equal(frozen, args[1])
    assert matches_one_device(plan, step, *args)


def test_arguments_that_change_places_get_the_layout_of_their_place():
    def step(a, b):
        return b, a

    a, b = array(16, 16), array(16, 16, seed=1)
    plan = planned(step, a, b, mesh=MESHES[1], constraints={"a": P("data"), "b": P(None, "model")})
    first, second = plan.jit(step)(a, b)
    assert_laid_out((first, second), plan.shardings)
    np.testing.assert_array_equal(first, b)


@pytest.mark.parametrize("form", ["one", "none of them used", "nothing at all", "no operation"])
def test_steps_with_next_to_nothing_in_them_are_planned(form):
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
    plan = planned(mlp_loss, mlp(), rows(), mesh=MESHES[1])
    assert_close(jax.grad(plan.jit(mlp_loss))(mlp(), rows()), jax.grad(mlp_loss)(mlp(), rows()))


def test_a_planned_step_runs_inside_of_a_loop():
    plan = planned(mlp_step, mlp(), rows(), mesh=MESHES[1])
    step = plan.jit(mlp_step)
    _, losses = lax.scan(lambda state, _: step(state, rows()), plan.put(mlp()), None, length=2)
    _, expected = lax.scan(lambda state, _: mlp_step(state, rows()), mlp(), None, length=2)
    assert_close(losses, expected)


def test_bfloat16_parameters_stay_so_and_train_alike():
    def step(params, batch):
        loss, gradients = jax.value_and_grad(mlp_loss)(params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), batch))
        return sgd(params, gradients), loss.astype(jnp.float32)

    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), mlp())
    plan = planned(step, params, rows(), mesh=MESHES[1])
    after, loss = plan.jit(step)(params, rows())
    assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {jnp.dtype("bfloat16")}
    assert_close(loss, step(params, rows())[1], 0.02)


def test_numpy_arrays_of_64_bits_are_planned_as_jax_takes_them():
    batch = jax.tree.map(lambda x: np.asarray(x, np.float64), rows())
    plan = planned(mlp_step, mlp(), batch, mesh=MESHES[0], constraints={"batch/*": P()})
    assert {leaf.dtype for leaf in plan.inputs} == {"float32"}
    assert plan.cost.memory.batch == sum(leaf.nbytes for leaf in jax.tree.leaves(rows()))
    assert_close(plan.jit(mlp_step)(mlp(), batch), mlp_step(mlp(), rows()))
    assert_close(plan.put(batch), rows())


def any_arguments(*args):
    return mlp_step(*args)


def test_methods_partials_and_functions_of_any_arguments_are_steps():
    class Trainer:
        def step(self, params, batch):
            return mlp_step(params, batch)

    for step, first in (
        (Trainer().step, "params/bias"),
        (functools.partial(mlp_step), "params/bias"),
        (any_arguments, "0/bias"),
    ):
        plan = planned(step, mlp(), rows(), mesh=MESHES[0])
        assert plan.inputs[0].path == first
        assert matches_one_device(plan, step, mlp(), rows())


def auto_mesh(names=("data", "model")):
    return jax.make_mesh((2, 4), names, axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize(
    "mesh",
    [
        auto_mesh,
        lambda: AbstractMesh((2, 4), ("data", "model")),
        lambda: {"data": 2, "model": np.int64(4)},
        lambda: jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2),
    ],
    ids=["Mesh", "AbstractMesh", "dict", "explicit axes"],
)
def test_a_mesh_is_taken_in_every_form(mesh):
    plan = planned(mlp_step, mlp(), rows(), mesh=mesh())
    assert plan.mesh_shape == {"data": 2, "model": 4}
    assert matches_one_device(plan, mlp_step, mlp(), rows())


def test_the_devices_that_were_given_are_those_that_run_it():
    devices = jax.devices()[4:]
    for choice in ({"mesh": Mesh(np.array(devices), ("data",))}, {"devices": devices}):
        plan = planned(mlp_step, mlp(), rows(), **choice)
        _, loss = plan.jit(mlp_step)(mlp(), rows())
        assert loss.devices() == set(devices)


@pytest.mark.parametrize("count", [1, 6, 8])
def test_without_a_mesh_its_shape_is_found(count):
    plan = planned(mlp_step, mlp(), rows(12), devices=count)
    assert np.prod(list(plan.mesh_shape.values())) == count
    assert matches_one_device(plan, mlp_step, mlp(), rows(12))


def test_on_one_device_nothing_is_sent():
    plan = planned(mlp_step, mlp(), rows(), devices=1)
    assert plan.cost.collectives == ()


def test_a_mesh_axis_of_size_one_costs_nothing():
    one, two = (planned(mlp_step, mlp(), rows(), mesh=mesh) for mesh in ({"data": 8}, {"data": 8, "model": 1}))
    assert two.cost.seconds == pytest.approx(one.cost.seconds)
    assert all(each.axes == ("data",) for each in two.cost.collectives)


def test_more_devices_than_are_here_can_be_planned_for_but_not_run():
    plan = planned(mlp_step, mlp(), rows(64), devices=64)
    assert isinstance(plan.mesh, AbstractMesh)
    assert "64" in str(plan)
    for use in (lambda: plan.jit(mlp_step), lambda: plan.put(mlp()), lambda: plan.init(mlp)):
        with pytest.raises(ValueError, match=r"the plan is for 64 devices .* this process has 8"):
            use()


def test_a_plan_is_made_and_compiled_from_shapes_alone():
    plan = planned(mlp_step, like(mlp()), like(rows()), mesh=MESHES[1])
    compiled = plan.jit(mlp_step, donate_argnums=0).lower(like(mlp()), like(rows())).compile()
    assert_close(compiled(plan.put(mlp()), plan.put(rows())), mlp_step(mlp(), rows()))


def test_equal_calls_give_equal_plans():
    step, state, batch = next(make for make in STEPS if make.__name__ == "in_parts")()
    one, other = (planned(step, *state, batch, devices=8) for _ in range(2))
    assert one == other
    assert str(one) == str(other)


# What the step itself prescribes.


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
    assert matches_one_device(plan, step, mlp(), rows())
    assert "PartitionSpec('model', 'data')" in str(jax.make_jaxpr(plan.jit(step))(mlp(), rows())).replace("P(", "PartitionSpec(")


@pytest.mark.parametrize("names", [("data", "model"), ("rows", "columns")])
def test_a_mesh_named_in_the_step_is_the_one_that_is_found(names):
    step = with_constraint(auto_mesh(names), P(*names))
    plan = planned(step, mlp(), rows())
    assert plan.mesh_shape == {names[0]: 2, names[1]: 4}
    assert matches_one_device(plan, step, mlp(), rows())


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 4, "model": 2}, {"x": 2, "y": 4}], ids=str)
def test_a_step_on_another_mesh_than_the_plan_is_refused(mesh):
    for step in (with_shard_map(auto_mesh()), with_constraint(auto_mesh(), P("data"))):
        with pytest.raises(ValueError, match=r"on mesh data 2 × model 4 .* plan with mesh={'data': 2, 'model': 4}"):
            planned(step, mlp(), rows(), mesh=mesh)


def test_explicit_axes_around_the_call_are_refused():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"mesh with explicit axes .*AxisType\.Auto"):
        planned(mlp_step, like(mlp()), like(rows()), mesh=mesh)


@pytest.mark.parametrize("effect", ["print", "callback"])
def test_a_step_with_side_effects_is_refused(effect):
    def step(params, batch):
        if effect == "print":
            jax.debug.print("{}", batch["x"][0, 0])
        else:
            io_callback(print, None, batch["x"][0, 0], ordered=True)
        return mlp_step(params, batch)

    with pytest.raises(ValueError, match="the step has side effects"):
        planned(step, mlp(), rows(), mesh=MESHES[0])


def test_what_the_step_raises_comes_through():
    class OwnError(Exception):
        pass

    def step(params, batch):
        raise OwnError("mine")

    with pytest.raises(OwnError, match="mine"):
        planned(step, mlp(), rows(), mesh=MESHES[0])


def test_a_leaf_that_is_no_array_is_named():
    with pytest.raises(TypeError, match="leaf at 'batch/name' that is no array: str"):
        planned(mlp_step, mlp(), {**rows(), "name": "digits"}, mesh=MESHES[0])


# The memory limit.


def test_what_does_not_fit_says_by_how_much_and_what_is_largest():
    with pytest.raises(PlanError, match="no layout fits 1 KiB a device on mesh data 2 × model 4") as raised:
        planned(mlp_step, mlp(), rows(), mesh=MESHES[1], memory="1KiB")
    for said in ("too much", "of 'params/in' float32[16, 32]", "of an activation float32[", "jax.checkpoint"):
        assert said in str(raised.value)


def test_a_lower_limit_is_kept_by_sharding_more():
    free = planned(mlp_step, mlp(64, 128), rows(16, 64), mesh={"data": 8}, constraints={"*": P()})
    limit = free.cost.memory.total // 2
    tight = planned(mlp_step, mlp(64, 128), rows(16, 64), mesh={"data": 8}, memory=limit)
    assert tight.cost.memory.total <= limit
    assert any(any(leaf.stored) for leaf in tight.inputs if leaf.role == "parameters")
    assert matches_one_device(tight, mlp_step, mlp(64, 128), rows(16, 64))


@pytest.mark.parametrize("memory", [0, -1, 0.4, True, float("nan"), float("inf"), "0B", "", ".", "16 gigs", "1.2.3GB"])
def test_a_limit_that_is_no_number_of_bytes_is_refused(memory):
    with pytest.raises(ValueError, match="memory="):
        planned(mlp_step, mlp(), rows(), mesh=MESHES[0], memory=memory)


@pytest.mark.parametrize("memory", [[1], {}, object(), 1j, 10**400])
def test_a_limit_of_another_type_is_refused_in_words(memory):
    with pytest.raises(TypeError, match=r"memory=.* is no number of bytes, and no text such as '16GiB'"):
        planned(mlp_step, mlp(), rows(), mesh=MESHES[0], memory=memory)


@pytest.mark.parametrize(
    ("text", "number"), [("16GiB", 2**34), ("16 GB", 16 * 10**9), ("1.5kib", 1536), ("2048", 2048), (2048.9, 2048)]
)
def test_a_limit_is_read_with_its_unit(text, number):
    from penstock.shard.units import parse_bytes

    assert parse_bytes(text) == number


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "under jit"])
def test_what_is_gathered_for_the_forward_pass_is_not_gathered_again_by_checkpoint(nested):
    def block(w, x):
        return x + jnp.tanh(x @ w["up"]) @ w["down"]

    def step(state, x):
        def loss(state):
            y = x
            for w in state:
                y = jax.checkpoint(jax.jit(block) if nested else block)(w, y)
            return (y**2).mean()

        value, gradients = jax.value_and_grad(loss)(state)
        return sgd(state, gradients), value

    def args(rows, width, hidden):
        return [{"up": array(width, hidden), "down": array(hidden, width)} for _ in range(2)], array(rows, width)

    large = jax.eval_shape(lambda: args(65_536, 256, 512))
    plan = ps.plan(step, *large, mesh={"data": 8}, hardware="tpu-v5e", check=False)
    (gathers,) = (each.count for each in plan.cost.collectives if each.kind == "all-gather")
    assert gathers == 4  # one of each weight
    assert sum(each.count for each in plan.verify().measured.collectives if each.kind == "all-gather") == gathers
    small = args(64, 16, 32)
    assert matches_one_device(planned(step, *small, mesh=MESHES[1], constraints={"state/*": P("data")}), step, *small)
