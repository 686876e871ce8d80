"""Steps take arguments by keyword, in planning and in all uses of the plan."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tests.shard.assertions import assert_close, assert_laid_out
from tests.shard.eager import like, planned
from tests.shard.steps import mlp, mlp_step, rows

import penstock as ps


def by_name(params, /, *, batch, rate=None):
    new, loss = mlp_step(params, batch)
    return (new, loss) if rate is None else (jax.tree.map(lambda w, v: w + rate * (v - w), params, new), loss)


def variadic(params, **leaves):
    return mlp_step(params, leaves)


MESH = {"data": 2}
FORMS = {
    "positional or keyword": (mlp_step, {"batch": rows()}),
    "keyword only": (by_name, {"batch": rows()}),
    "two of them": (by_name, {"rate": 0.5, "batch": rows()}),
    "jitted": (jax.jit(by_name), {"batch": rows()}),
    "partial": (functools.partial(by_name, rate=0.25), {"batch": rows()}),
}


def plan_of(step, **named):
    return planned(step, like(mlp()), mesh=MESH, constraints={"batch/*": P("data")}, **named)


@pytest.mark.parametrize("form", FORMS)
def test_a_step_takes_keyword_arguments(form):
    step, named = FORMS[form]
    plan = plan_of(step, **named)
    batch, state = plan.put(rows()), plan.init(mlp)
    assert_laid_out(batch, plan.batch_shardings)
    train = plan.jit(step, donate_argnums=0)
    assert_close(train(state, **{**named, "batch": batch}), jax.jit(step)(mlp(), **named))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_keyword_arguments_are_taken_in_all_uses_of_a_plan(tmp_path):
    step, named = FORMS["two of them"]
    plan = plan_of(step, **named)
    with ps.feed([jax.tree.map(np.asarray, rows())], to=plan) as batches:
        batch = next(batches)
    assert_laid_out(batch, plan.batch_shardings)
    assert plan.verify().measured.memory > 0
    assert plan.jit(step).lower(plan.init(mlp), **named).compile() is not None
    plan.save(tmp_path / "plan.json")
    loaded = ps.Plan.load(tmp_path / "plan.json")
    assert loaded.bind(step, mlp(), **named).shardings == plan.shardings
    backwards = dict(reversed({**named, "batch": batch}.items()))
    assert_close(loaded.jit(step)(mlp(), **backwards), jax.jit(step)(mlp(), **named))


def test_an_argument_may_be_given_by_position_or_by_name():
    plan = planned(mlp_step, mlp(), mesh=MESH, batch=rows())
    train, expected = plan.jit(mlp_step), jax.jit(mlp_step)(mlp(), rows())
    assert [leaf.path for leaf in plan.inputs][-2:] == ["batch/x", "batch/y"]
    for result in (train(mlp(), rows()), train(mlp(), batch=rows()), train(batch=rows(), params=mlp())):
        assert_close(result, expected)


def test_arguments_of_any_name_are_leaves_of_their_own():
    plan = planned(variadic, mlp(), mesh=MESH, **rows())
    assert [leaf.path for leaf in plan.inputs][-2:] == ["x", "y"]
    assert_close(plan.jit(variadic)(mlp(), **rows()), jax.jit(variadic)(mlp(), **rows()))


def test_a_parameter_with_the_name_of_an_option_is_given_by_position():
    def step(params, batch, memory):
        return mlp_step(jax.tree.map(lambda w: w + memory, params), batch)

    def step_by_name(params, *, batch, mesh):
        return mlp_step(params, batch)

    plan = planned(step, mlp(), rows(), 1.0, mesh=MESH, memory="1GiB")
    assert plan.limit == 2**30
    assert_close(plan.jit(step)(mlp(), rows(), memory=1.0), jax.jit(step)(mlp(), rows(), 1.0))
    for options in ({}, {"memory": np.ones(3)}):
        with pytest.raises(TypeError, match=r"a parameter 'memory', which is also an option of ps.plan, .* by position"):
            planned(step, mlp(), rows(), mesh=MESH, **options)
    with pytest.raises(TypeError, match="a parameter 'mesh', which is also an option"):
        planned(step_by_name, mlp(), batch=rows(), mesh=MESH)


def test_a_keyword_that_neither_takes_is_named():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'mehs'; .* options mesh, devices, hardware, memory"):
        planned(mlp_step, mlp(), rows(), mehs=MESH)
