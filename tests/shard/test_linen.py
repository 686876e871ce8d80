"""A Linen TrainState is state, with functions in its structure that need not be those of the plan."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training import train_state
from jax.sharding import PartitionSpec as P
from tests.shard.assertions import assert_close, assert_laid_out
from tests.shard.eager import planned
from tests.shard.steps import rows

KEY = jax.random.key(0)
MESH = {"data": 2, "model": 2}
CONSTRAINTS = {"batch/*": P("data"), "state/params/up/kernel*": P(None, "model")}


class State(train_state.TrainState):
    batch_stats: dict
    key: jax.Array


class Net(nn.Module):
    boxes: bool = False

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.Dense(32, name="up", kernel_init=nn.with_partitioning(init, (None, "model")) if self.boxes else init)(x)
        x = nn.Dropout(0.2, deterministic=False)(nn.relu(nn.BatchNorm(use_running_average=False)(x)))
        return nn.Dense(16)(x)


def create(key, boxes=False):
    model = Net(boxes)
    variables = model.init({"params": key, "dropout": key}, jnp.ones((1, 16)))
    optimizer = optax.sgd(0.05, momentum=0.9)  # other functions each time
    return State.create(apply_fn=model.apply, tx=optimizer, key=key, **variables)


def train_step(state, batch):
    def loss(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        predicted, new = state.apply_fn(variables, batch["x"], rngs={"dropout": now}, mutable=["batch_stats"])
        return jnp.mean((predicted - batch["y"]) ** 2), new

    key, now = jax.random.split(state.key)
    (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients, key=key, **new), value


@pytest.mark.parametrize(
    ("wrap", "boxes"),
    [
        pytest.param(jax.jit, True, id="jit, boxes of metadata"),
        pytest.param(lambda step: step, False, id="plain, arrays", marks=pytest.mark.slow),
    ],
)
def test_a_train_state_is_created_put_and_trained(wrap, boxes):
    step, make = wrap(train_step), functools.partial(create, KEY, boxes)
    plan = planned(step, jax.eval_shape(make), rows(), mesh=MESH, constraints=CONSTRAINTS)
    assert len(plan.state) == len(plan.inputs) - 2
    train, train_alone = plan.jit(step, donate_argnums=0), jax.jit(train_step)
    alone, state = make(), plan.init(make)
    for each in (state, plan.put(make())):
        assert jax.tree.structure(each.params) == jax.tree.structure(alone.params)
        assert_close(each.params, alone.params)
        assert_laid_out(jax.tree.leaves(each), jax.tree.leaves(plan.shardings[0]))
    for _ in range(3):
        state, loss = train(state, rows())
        alone, expected = train_alone(alone, rows())
        assert_close(loss, expected, 1e-4)
    assert int(state.step) == 3
    assert_close(state.params, alone.params, 1e-3)
    assert_close(state.batch_stats, alone.batch_stats, 1e-3)
    assert_laid_out(jax.tree.leaves(state), jax.tree.leaves(plan.shardings[0]))


def test_a_train_state_with_other_arrays_is_refused():
    plan = planned(train_step, create(KEY), rows(), mesh=MESH)
    with pytest.raises(ValueError, match="other arguments: the plan has the argument 'state/params/BatchNorm_0/bias'"):
        plan.jit(train_step)(create(KEY).replace(params={}), rows())


def test_new_parameters_that_are_dropped_are_warned_of():
    def step(state, batch):
        new, loss = train_step(state, batch)
        return new.replace(params=state.params), loss

    with pytest.warns(UserWarning, match=r"a new value of 'state/params/.* and 5 more .* does not return it"):
        planned(step, create(KEY), rows(), mesh=MESH)
