"""Equinox modules are arguments as they are: they are planned, created, placed, trained and returned with their static leaves."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from tests.shard.assertions import assert_close, assert_laid_out
from tests.shard.eager import MESHES, planned
from tests.shard.steps import rows

import penstock as ps

CONSTRAINTS = {"batch/*": P("data"), "model/up/weight": P("model")}
OPTIMIZER = optax.sgd(0.05, momentum=0.9)
KEY = jax.random.key(0)


class Net(eqx.Module):
    up: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    activation: eqx.nn.Lambda
    down: eqx.nn.Linear

    def __init__(self, key):
        up, down = jax.random.split(key)
        self.up, self.down = eqx.nn.Linear(16, 32, key=up), eqx.nn.Linear(32, 16, key=down)
        self.norm, self.drop = eqx.nn.BatchNorm(32, "rows", mode="batch"), eqx.nn.Dropout(0.2)
        self.activation = eqx.nn.Lambda(lambda x: jnp.maximum(x, 0))  # another function in each model

    def __call__(self, x, statistics, key):
        hidden, statistics = self.norm(self.up(x), statistics)
        return self.down(self.drop(self.activation(hidden), key=key)), statistics


def create(key):
    model, statistics = eqx.nn.make_with_state(Net)(key)
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array)), statistics, key


def train_step(model, momentum, statistics, key, batch):
    def loss(model, statistics):
        keys = jax.random.split(now, len(batch["x"]))
        call = jax.vmap(model, axis_name="rows", in_axes=(0, None, 0), out_axes=(0, None))
        predicted, statistics = call(batch["x"], statistics, keys)
        return jnp.mean((predicted - batch["y"]) ** 2), statistics

    key, now = jax.random.split(key)
    (value, statistics), gradients = eqx.filter_value_and_grad(loss, has_aux=True)(model, statistics)
    updates, momentum = OPTIMIZER.update(gradients, momentum)
    return eqx.apply_updates(model, updates), momentum, statistics, key, value


def arrays(tree):
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf,
                        eqx.filter(tree, eqx.is_array))  # fmt: skip


def trains_as_alone(train, state, steps=3):
    """Train with a plan and without, compare, and return the state."""
    alone = create(KEY)
    for _ in range(steps):
        *state, loss = train(*state, rows())
        *alone, expected = eqx.filter_jit(train_step)(*alone, rows())
        assert_close(loss, expected, 1e-4)
    assert_close(jax.tree.leaves(arrays(state)), jax.tree.leaves(arrays(alone)), 1e-3)
    return tuple(state)


@pytest.mark.parametrize("wrap", [lambda step: step, eqx.filter_jit], ids=["plain", "filter_jit"])
def test_modules_are_planned_created_and_trained(wrap):
    step = wrap(train_step)
    plan = planned(step, *eqx.filter_eval_shape(create, KEY), rows(), mesh=MESHES[1], constraints=CONSTRAINTS)
    assert {leaf.path for leaf in plan.inputs if leaf.role == "batch"} == {"batch/x", "batch/y"}
    assert {leaf.path for leaf in plan.inputs if leaf.path.startswith("model/up")} == {"model/up/weight", "model/up/bias"}
    assert {leaf.path for leaf in plan.inputs} - {plan.inputs[index].path for index in plan.state.values()} == {
        "key", "batch/x", "batch/y"}  # fmt: skip
    state = plan.init(create, KEY)
    assert_laid_out(eqx.filter(state, eqx.is_array), plan.shardings[:4])
    assert_close(jax.tree.leaves(arrays(state)), jax.tree.leaves(arrays(create(KEY))))
    old = jax.tree.leaves(eqx.filter(state, eqx.is_array))
    state = trains_as_alone(plan.jit(step, donate_argnums=(0, 1, 2, 3)), state)
    assert all(leaf.is_deleted() for leaf in old)
    assert_laid_out(eqx.filter(state, eqx.is_array), plan.shardings[:4])
    assert state[0].drop.p == 0.2


def test_modules_are_put_saved_and_loaded(tmp_path):
    plan = planned(train_step, *create(KEY), rows(), mesh=MESHES[1], constraints=CONSTRAINTS)
    plan.save(tmp_path / "plan.json")
    loaded = ps.Plan.load(tmp_path / "plan.json")
    for each in (plan, loaded, loaded.bind(train_step, *create(KEY), rows())):
        given = create(KEY)
        state = each.put(given)
        assert state[0].activation.fn is given[0].activation.fn
        trains_as_alone(each.jit(train_step), state)


def test_a_module_split_by_hand_trains_too():
    model, *rest = create(KEY)
    params, static = eqx.partition(model, eqx.is_array)

    def step(params, *rest):
        new, *results = train_step(eqx.combine(params, static), *rest)
        return eqx.filter(new, eqx.is_array), *results

    plan = planned(step, params, *rest, rows(), mesh=MESHES[1])
    trains_as_alone(plan.jit(step), plan.put((params, *rest)))


def test_another_static_leaf_is_another_step():
    def evaluate(model, statistics, batch):
        return jax.vmap(model, axis_name="rows", in_axes=(0, None, None), out_axes=(0, None))(batch["x"], statistics, KEY)[0]

    model, _, statistics, _ = create(KEY)
    plan = planned(evaluate, eqx.nn.inference_mode(model), statistics, rows(), mesh=MESHES[0])
    with pytest.raises(ValueError, match="another step"):
        plan.jit(evaluate)(model, statistics, rows())
    still = eqx.nn.inference_mode(model)
    assert_close(plan.jit(evaluate)(still, statistics, rows()), evaluate(still, statistics, rows()))


def test_a_step_may_return_a_module_in_a_dict():
    def step(state, batch):
        *new, loss = train_step(*state["parts"], batch)
        return {"parts": tuple(new)}, loss

    plan = planned(step, {"parts": create(KEY)}, rows(), mesh=MESHES[1])
    state, _ = plan.jit(step)(plan.init(lambda: {"parts": create(KEY)}), rows())
    assert_laid_out(eqx.filter(state, eqx.is_array), plan.out_shardings[0])
