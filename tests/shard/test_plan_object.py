"""What is done with a plan: arguments are put where it has them, batches fed, its step called, on the devices that it names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tests.shard.assertions import assert_close, assert_laid_out
from tests.shard.steps import array, mlp, mlp_loss, mlp_step, rows, sgd

import penstock as ps

MESH = {"data": 2, "model": 4}
PINNED = {"batch/*": P("data"), "in": P("model", "data")}


def plan_of(step, *args, **options):
    return ps.plan(step, *args, **{"mesh": MESH, "hardware": "tpu-v5e", "check": False, "constraints": PINNED, **options})


def in_parts(params, x, y):
    value, gradients = jax.value_and_grad(mlp_loss)(params, {"x": x, "y": y})
    return sgd(params, gradients), value


def host_rows(n=16):
    return {name: np.asarray(leaf)[:n] for name, leaf in rows().items()}


def test_donated_state_is_given_up_and_its_successor_fits_in():
    plan = plan_of(mlp_step, mlp(), rows())
    step, state = plan.jit(mlp_step, donate_argnums=0), plan.put(mlp())
    after, _ = step(state, rows())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    step(after, rows())


def test_state_is_born_where_the_plan_has_it():
    plan = plan_of(mlp_step, mlp(), rows())
    state = plan.init(mlp)
    assert_laid_out(state, plan.shardings[0])
    assert_close(state, mlp())
    assert_laid_out(plan.put(rows()), plan.shardings[1])


def test_of_arguments_that_are_alike_it_is_said_which_is_put():
    def step(params, average, batch):
        loss, gradients = jax.value_and_grad(mlp_loss)(params, batch)
        params = sgd(params, gradients)
        return params, jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params), loss

    args = (mlp(), mlp(), rows())
    plan = plan_of(step, *args, constraints={"params/in": P(), "average/in": P("data", "model")})
    with pytest.raises(ValueError, match=r"'params' and 'average' have this structure, .* argument='params'"):
        plan.put(mlp())
    with pytest.raises(ValueError, match="no argument 'ema'; its arguments are 'params', 'average', 'batch'"):
        plan.put(mlp(), argument="ema")
    params, average = plan.put(mlp(), argument="params"), plan.init(mlp, argument="average")
    assert_laid_out((params, average), plan.shardings[:2])
    assert_close(plan.jit(step)(params, average, plan.put(rows())), step(*args))


def test_what_is_no_argument_of_the_step_is_neither_made_nor_put():
    plan = plan_of(mlp_step, mlp(), rows())
    with pytest.raises(ValueError, match=r"the nearest is 'params', where 'bias' is float32\[32\], and here it is float32\[31\]"):
        plan.put(mlp(hidden=31))
    with pytest.raises(ValueError, match="'out' where this has 'scale'"):
        plan.init(lambda: {**{name: mlp()[name] for name in ("bias", "in")}, "scale": array(32, 16)})


def test_a_call_with_other_arguments_says_what_differs():
    plan = plan_of(mlp_step, mlp(), rows())
    with pytest.raises(ValueError, match=r"'batch/x' is float32\[16, 16\] in the plan, and float32\[32, 16\] in the step"):
        plan.jit(mlp_step)(mlp(), rows(32))


def test_a_call_of_another_step_says_so():
    plan = plan_of(mlp_step, mlp(), rows())
    with pytest.raises(ValueError, match="the program differs"):
        plan.jit(lambda params, batch: (params, mlp_loss(params, batch)))(mlp(), rows())


def test_the_message_says_which_argument_or_result_differs():
    plan = plan_of(mlp_step, mlp(), rows())
    others = {
        "the step has the result '1/more'": lambda params, batch: (params, {"more": mlp_loss(params, batch)}),
        "in a number written in it": lambda params, batch: mlp_step(params, jax.tree.map(lambda leaf: leaf * 2.0, batch)),
    }
    for said, step in others.items():
        with pytest.raises(ValueError, match=said):
            plan.jit(step)(mlp(), rows())
    with pytest.raises(ValueError, match="the step has the argument 'batch/z', which the plan has not"):
        plan.bind(mlp_step, mlp(), {**rows(), "z": array(4)})


def test_arguments_that_changed_places_are_named():
    plan = plan_of(mlp_step, mlp(), rows())
    with pytest.raises(ValueError, match="in another order: the plan has 'params/bias' where the step has 'batch/x'"):
        plan.bind(lambda batch, params: mlp_step(params, batch), rows(), mlp())


def test_a_plan_is_of_the_step_with_and_without_jit_and_under_its_mesh():
    plan = plan_of(mlp_step, mlp(), rows())
    expected = mlp_step(mlp(), rows())
    assert_close(plan.jit(jax.jit(mlp_step))(plan.put(mlp()), plan.put(rows())), expected)
    with jax.set_mesh(plan.mesh):
        assert_close(plan.jit(mlp_step)(plan.put(mlp()), plan.put(rows())), expected)
        inside = plan_of(mlp_step, mlp(), rows())
    assert_close(inside.jit(mlp_step)(plan.put(mlp()), plan.put(rows())), expected)


@pytest.mark.parametrize("setting", ["in_shardings", "out_shardings", "static_argnums", "static_argnames", "donate_argnames"])
def test_settings_of_jit_that_the_plan_decides_are_refused(setting):
    with pytest.raises(TypeError, match=f"plan.jit takes no {setting}"):
        plan_of(mlp_step, mlp(), rows()).jit(mlp_step, **{setting: None})


def test_arguments_that_are_not_used_have_the_bytes_that_the_plan_says():
    def step(params, batch):
        new, loss = mlp_step({"in": params["in"], "out": params["out"], "bias": params["bias"]}, batch)
        return new | {"unused": params["unused"] * 0}, loss

    args = (mlp() | {"unused": array(8)}, rows())
    plan = plan_of(step, *args)
    compiled = plan.jit(step, donate_argnums=0).lower(*args).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == plan.cost.memory.arguments
    assert plan.verify().measured.arguments == plan.cost.memory.arguments


def test_batches_are_fed_to_where_the_plan_has_them():
    plan = plan_of(mlp_step, mlp(), rows())
    loader = ps.Loader(host_rows(), batch_size=len(rows()["x"]), epochs=2)
    state, train = plan.init(mlp), plan.jit(mlp_step)
    with ps.feed(loader, to=plan) as batches:
        for batch in batches:
            assert jax.tree.map(lambda leaf: leaf.sharding, batch) == plan.shardings[1]
            state, loss = train(state, batch)
    assert np.isfinite(loss)


def test_several_arguments_that_are_the_batch_are_fed_as_a_tuple():
    plan = plan_of(in_parts, mlp(), rows()["x"], rows()["y"], constraints={"x": P("data"), "y": P(("data", "model"))})
    with ps.feed([(host_rows()["x"], host_rows()["y"])], to=plan) as batches:
        x, y = next(batches)
    assert (x.sharding.spec, y.sharding.spec) == (P("data", None), P(("data", "model"), None))
    assert np.isfinite(plan.jit(in_parts)(plan.init(mlp), x, y)[1])


def test_a_batch_that_does_not_divide_is_named():
    plan = plan_of(mlp_step, mlp(), rows())
    with ps.feed([host_rows(7)], to=plan) as batches, pytest.raises(ValueError, match=r"leaf 'x' of shape \(7, 16\) does not"):
        next(batches)


def test_a_role_that_was_given_says_what_is_the_batch():
    def step(params, batch):  # carried along, as hidden state is in truncated backpropagation
        new, value = mlp_step(params, batch)
        return new, {"x": batch["x"] * value, "y": batch["y"]}

    with pytest.raises(ValueError, match="no argument of the step is a batch"):
        _ = plan_of(step, mlp(), rows()).batch_shardings
    plan = plan_of(step, mlp(), rows(), roles={"batch/*": "batch"})
    assert plan.batch_shardings == plan.shardings[1]


def test_without_its_devices_or_its_step_a_plan_feeds_nothing(tmp_path):
    with pytest.raises(ValueError, match="the plan is for 16 devices"):
        ps.feed([host_rows()], to=plan_of(mlp_step, mlp(), rows(), mesh={"data": 4, "model": 4}))
    plan_of(mlp_step, mlp(), rows()).save(tmp_path / "plan.json")
    loaded = ps.Plan.load(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"plan\.bind\(step, \*args\) first"):
        ps.feed([host_rows()], to=loaded)
    assert loaded.bind(mlp_step, mlp(), rows()).batch_shardings == plan_of(mlp_step, mlp(), rows()).batch_shardings


def test_a_loaded_plan_takes_devices_in_their_order(tmp_path):
    plan_of(mlp_step, mlp(), rows()).save(tmp_path / "plan.json")
    backwards = jax.devices()[::-1]
    for devices in (backwards, np.array(backwards).reshape(2, 4)):
        loaded = ps.Plan.load(tmp_path / "plan.json", devices)
        assert list(loaded.mesh.devices.flat) == backwards
        state, _ = loaded.jit(mlp_step)(loaded.put(mlp()), rows())
        assert state["in"].sharding.mesh.devices.tolist() == loaded.mesh.devices.tolist()


def test_a_loaded_plan_refuses_another_number_of_devices(tmp_path):
    plan_of(mlp_step, mlp(), rows()).save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"is for 8 devices \(data 2 × model 4\), and 4 were given"):
        ps.Plan.load(tmp_path / "plan.json", jax.devices()[:4])


def test_frozen_arguments_are_no_batch():
    def step(params, frozen, batch):
        def loss(params):
            return mlp_loss(jax.tree.map(jnp.add, params, frozen), batch)

        return sgd(params, jax.grad(loss)(params))

    plan = plan_of(step, mlp(), mlp(), rows(), constraints={"batch/*": P("data")})
    assert plan.batch_shardings == plan.shardings[2]
