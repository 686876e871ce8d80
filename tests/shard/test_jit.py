"""The jitted step of a plan follows it, and refuses any other step."""

import functools
import logging

import jax
import pytest
from tests.shard.assertions import assert_close
from tests.shard.example import plan_of
from tests.shard.steps import V5E_ON_CPU, array, mlp, mlp_loss, mlp_step, rows, sgd

import penstock as ps


def test_donated_state_is_deleted_and_the_new_state_is_accepted():
    plan = plan_of(mlp_step, mlp(), rows())
    step, state = plan.jit(mlp_step, donate_argnums=0), plan.put(mlp())
    after, _ = step(state, rows())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    step(after, rows())


def test_a_call_with_other_arguments_says_what_differs():
    plan = plan_of(mlp_step, mlp(), rows())
    with pytest.raises(ValueError, match=r"'batch/x' is float32\[16, 16\] in the plan, and float32\[32, 16\] in the step"):
        plan.jit(mlp_step)(mlp(), rows(32))


OTHER_ARGUMENTS = {
    r"'batch/x' is float32\[16, 16\] in the plan, and float32\[16, 8\]": lambda: {**rows(), "x": array(16, 8)},
    "plan has the argument 'batch/y', .* has not; the step has the argument 'batch/z'": lambda: {
        "x": rows()["x"],
        "z": rows()["y"],
    },
    "plan has the argument 'batch/x', .* the step has the argument 'batch', which the plan has not": lambda: rows()["x"],
}


@pytest.mark.parametrize("said", OTHER_ARGUMENTS)
def test_arguments_that_jax_or_the_step_refuse_are_compared_with_the_plan(said, tmp_path):
    plan = plan_of(mlp_step, mlp(), rows())
    plan.save(tmp_path / "plan.json")
    loaded, batch = ps.Plan.load(tmp_path / "plan.json"), OTHER_ARGUMENTS[said]()
    uses = (plan.jit(mlp_step), plan.jit(mlp_step).lower, loaded.jit(mlp_step), functools.partial(loaded.bind, mlp_step))
    for use in uses:
        with pytest.raises(ValueError, match=said):
            use(mlp(), batch)


def test_an_error_of_the_step_is_passed_on():
    def fails(params, batch):
        raise KeyError("my own")

    plan = plan_of(mlp_step, mlp(), rows())
    with pytest.raises(KeyError, match="my own"):
        plan.jit(fails)(mlp(), rows())


def test_a_call_of_another_step_says_so():
    plan = plan_of(mlp_step, mlp(), rows())
    with pytest.raises(ValueError, match="the program differs"):
        plan.jit(lambda params, batch: (params, mlp_loss(params, batch)))(mlp(), rows())


def test_the_error_names_the_argument_or_result_that_differs():
    plan = plan_of(mlp_step, mlp(), rows())
    others = {
        "the step has the result '1/more'": lambda params, batch: (params, {"more": mlp_loss(params, batch)}),
        "the program differs: in an operation": lambda params, batch: mlp_step(params, jax.tree.map(jax.numpy.sin, batch)),
    }
    for said, step in others.items():
        with pytest.raises(ValueError, match=said):
            plan.jit(step)(mlp(), rows())
    with pytest.raises(ValueError, match="the step has the argument 'batch/z', which the plan has not"):
        plan.bind(mlp_step, mlp(), {**rows(), "z": array(4)})


def test_a_plan_fits_a_step_with_other_numbers_and_notes_it(caplog, tmp_path):
    def step(rate):
        def run(params, batch):
            loss, gradients = jax.value_and_grad(mlp_loss)(params, batch)
            return sgd(params, gradients, rate), loss

        return run

    plan_of(step(0.1), mlp(), rows()).save(tmp_path / "plan.json")
    plan = ps.Plan.load(tmp_path / "plan.json")
    with caplog.at_level(logging.INFO, "penstock.shard"):
        plan.bind(step(0.1), mlp(), rows())
        assert not caplog.records
        expected = jax.jit(step(0.2))(mlp(), rows())
        for use in (plan, plan.bind(step(0.3), mlp(), rows())):
            caplog.clear()
            assert_close(use.jit(step(0.2))(mlp(), rows()), expected)
            assert "a step with other numbers" in caplog.text


def test_arguments_in_another_order_are_named():
    plan = plan_of(mlp_step, mlp(), rows())
    with pytest.raises(ValueError, match="in another order: the plan has 'params/bias' where the step has 'batch/x'"):
        plan.bind(lambda batch, params: mlp_step(params, batch), rows(), mlp())


def test_a_plan_accepts_the_step_jitted_or_not_and_under_its_mesh():
    plan = plan_of(mlp_step, mlp(), rows())
    expected = jax.jit(mlp_step)(mlp(), rows())
    assert_close(plan.jit(jax.jit(mlp_step))(plan.put(mlp()), plan.put(rows())), expected)
    with jax.set_mesh(plan.mesh):
        assert_close(plan.jit(mlp_step)(plan.put(mlp()), plan.put(rows())), expected)
        inside = plan_of(mlp_step, mlp(), rows())
    assert_close(inside.jit(mlp_step)(plan.put(mlp()), plan.put(rows())), expected)


@pytest.mark.parametrize("setting", ["in_shardings", "out_shardings", "static_argnums", "static_argnames", "donate_argnames"])
def test_settings_of_jit_that_the_plan_decides_are_refused(setting):
    with pytest.raises(TypeError, match=f"plan.jit takes no {setting}"):
        plan_of(mlp_step, mlp(), rows()).jit(mlp_step, **{setting: None})


def test_unused_arguments_keep_the_predicted_bytes():
    def step(params, batch):
        new, loss = mlp_step({"in": params["in"], "out": params["out"], "bias": params["bias"]}, batch)
        return new | {"unused": params["unused"] * 0}, loss

    args = (mlp() | {"unused": array(8)}, rows())
    plan = plan_of(step, *args, hardware=V5E_ON_CPU)
    compiled = plan.jit(step, donate_argnums=0).lower(*args).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == plan.cost.memory.arguments
    assert plan.verify().measured.arguments == plan.cost.memory.arguments
