"""Trees of arrays are matched with the arguments of the step, and the batch is found among them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from tests.shard.assertions import assert_close, assert_laid_out
from tests.shard.example import plan_of
from tests.shard.steps import array, mlp, mlp_loss, mlp_step, rows, sgd


def test_equal_arguments_with_different_layouts_have_to_be_named():
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
    assert_close(plan.jit(step)(params, average, plan.put(rows())), jax.jit(step)(*args))


def test_a_tree_that_is_no_argument_of_the_step_is_refused():
    plan = plan_of(mlp_step, mlp(), rows())
    with pytest.raises(ValueError, match=r"the nearest is 'params', where 'bias' is float32\[32\], and here it is float32\[31\]"):
        plan.put(mlp(hidden=31))
    with pytest.raises(ValueError, match="'out' where this has 'scale'"):
        plan.init(lambda: {**{name: mlp()[name] for name in ("bias", "in")}, "scale": array(32, 16)})


def test_a_tuple_is_several_arguments_that_follow_each_other():
    def step(params, momentum, count, batch):
        loss, gradients = jax.value_and_grad(mlp_loss)(params, batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return sgd(params, momentum), momentum, count + 1, loss

    args = (mlp(), jax.tree.map(jnp.zeros_like, mlp()), jnp.int32(0), rows())
    plan = plan_of(step, *args, constraints={"params/in": P(), "momentum/in": P("data", "model")})
    for tree, shardings in ((args[:3], plan.shardings[:3]), (args[1:], plan.shardings[1:]), (args, plan.shardings)):
        for made in (plan.put(tree), plan.init(lambda tree=tree: tree)):
            assert_laid_out(made, shardings)
            assert_close(made, tree)
    assert_laid_out(plan.put(args[:2], argument="params"), plan.shardings[:2])
    with pytest.raises(ValueError, match=r"part 1 of this tuple; .* 'params', where 'bias' is float32\[32\]"):
        plan.put((mlp(), mlp(hidden=31), jnp.int32(0)))
    with pytest.raises(ValueError, match=r"do not follow each other: .*'params', 'momentum', 'count', 'batch'"):
        plan.put((args[2], args[0]))
    with pytest.raises(ValueError, match="no argument of the step has this structure"):
        plan.put(args[:2], argument="momentum")


def test_the_nearest_argument_is_the_one_with_the_same_leaves():
    plan = plan_of(mlp_step, mlp(), rows())
    integers = jax.tree.map(lambda leaf: leaf.astype(int), rows())
    with pytest.raises(ValueError, match=r"the nearest is 'batch', where 'x' is float32\[16, 16\], and here it is int32"):
        plan.put(integers)


def test_a_leaf_that_is_no_array_is_named():
    plan = plan_of(mlp_step, mlp(), rows())
    for use in (plan.put, lambda tree: plan.init(lambda: tree)):
        with pytest.raises(TypeError, match="a leaf at 'bias' that is not an array: str"):
            use(mlp() | {"bias": "none"})


def test_a_given_role_selects_the_batch():
    def step(params, batch):  # carried along, as hidden state is in truncated backpropagation
        new, value = mlp_step(params, batch)
        return new, {"x": batch["x"] * value, "y": batch["y"]}

    with pytest.raises(ValueError, match="no argument of the step is a batch"):
        _ = plan_of(step, mlp(), rows()).batch_shardings
    plan = plan_of(step, mlp(), rows(), roles={"batch/*": "batch"})
    assert plan.batch_shardings == plan.shardings[1]


def test_frozen_arguments_are_no_batch():
    def step(params, frozen, batch):
        def loss(params):
            return mlp_loss(jax.tree.map(jnp.add, params, frozen), batch)

        return sgd(params, jax.grad(loss)(params))

    plan = plan_of(step, mlp(), mlp(), rows(), constraints={"batch/*": P("data")})
    assert plan.batch_shardings == plan.shardings[2]
