"""Equinox modules are arguments as they are: they are planned, created, placed, trained and returned with their static leaves."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from tests.extras import require
from tests.shard.assertions import assert_close, assert_laid_out
from tests.shard.eager import planned
from tests.shard.example import plan_of
from tests.shard.steps import mlp, mlp_step, rows

import penstock as ps

eqx = require("equinox")

MESH = {"data": 2, "model": 2}
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


@pytest.fixture(scope="module")
def alone():
    """Return the losses of three steps on one device, and the arrays after them."""
    state, train, losses = create(KEY), eqx.filter_jit(train_step), []
    for _ in range(3):
        *state, loss = train(*state, rows())
        losses.append(loss)
    return losses, jax.tree.leaves(arrays(state))


def trains_as_alone(train, state, alone):
    """Train with a plan, compare with the training without, and return the state."""
    losses, after = alone
    for expected in losses:
        *state, loss = train(*state, rows())
        assert_close(loss, expected, 1e-4)
    assert_close(jax.tree.leaves(arrays(state)), after, 1e-3)
    return tuple(state)


@pytest.mark.parametrize(
    "wrap",
    [pytest.param(lambda step: step, id="plain", marks=pytest.mark.slow), pytest.param(eqx.filter_jit, id="filter_jit")],
)
def test_modules_are_planned_created_and_trained(wrap, alone):
    step = wrap(train_step)
    plan = planned(step, *eqx.filter_eval_shape(create, KEY), rows(), mesh=MESH, constraints=CONSTRAINTS)
    assert {leaf.path for leaf in plan.inputs if leaf.role == "batch"} == {"batch/x", "batch/y"}
    assert {leaf.path for leaf in plan.inputs if leaf.path.startswith("model/up")} == {"model/up/weight", "model/up/bias"}
    assert {leaf.path for leaf in plan.inputs} - {plan.inputs[index].path for index in plan.state.values()} == {
        "key", "batch/x", "batch/y"}  # fmt: skip
    state = plan.init(create, KEY)
    assert_laid_out(eqx.filter(state, eqx.is_array), plan.shardings[:4])
    assert_close(jax.tree.leaves(arrays(state)), jax.tree.leaves(arrays(create(KEY))))
    old = jax.tree.leaves(eqx.filter(state, eqx.is_array))
    state = trains_as_alone(plan.jit(step, donate_argnums=(0, 1, 2, 3)), state, alone)
    assert all(leaf.is_deleted() for leaf in old)
    assert_laid_out(eqx.filter(state, eqx.is_array), plan.shardings[:4])
    assert state[0].drop.p == 0.2


def test_modules_are_put_saved_and_loaded(alone, tmp_path):
    given = create(KEY)
    plan = planned(train_step, *given, rows(), mesh=MESH, constraints=CONSTRAINTS)
    plan.save(tmp_path / "plan.json")
    loaded = ps.Plan.load(tmp_path / "plan.json")
    for each in (plan, loaded, loaded.bind(train_step, *create(KEY), rows())):
        state = each.put(given)
        assert state[0].activation.fn is given[0].activation.fn
    trains_as_alone(loaded.jit(train_step), loaded.put(given), alone)


@pytest.mark.slow
def test_a_module_split_by_hand_trains_too(alone):
    model, *rest = create(KEY)
    params, static = eqx.partition(model, eqx.is_array)

    def step(params, *rest):
        new, *results = train_step(eqx.combine(params, static), *rest)
        return eqx.filter(new, eqx.is_array), *results

    plan = planned(step, params, *rest, rows(), mesh=MESH)
    trains_as_alone(plan.jit(step), plan.put((params, *rest)), alone)


def test_another_static_leaf_is_another_step():
    def evaluate(model, statistics, batch):
        return jax.vmap(model, axis_name="rows", in_axes=(0, None, None), out_axes=(0, None))(batch["x"], statistics, KEY)[0]

    model, _, statistics, _ = create(KEY)
    plan = planned(evaluate, eqx.nn.inference_mode(model), statistics, rows(), mesh=MESH)
    with pytest.raises(ValueError, match="another step"):
        plan.jit(evaluate)(model, statistics, rows())
    still = eqx.nn.inference_mode(model)
    assert_close(plan.jit(evaluate)(still, statistics, rows()), eqx.filter_jit(evaluate)(still, statistics, rows()))


def test_a_step_may_return_a_module_in_a_dict():
    def step(state, batch):
        def loss(model):
            return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

        value, gradients = eqx.filter_value_and_grad(loss)(state["model"])
        return {"model": eqx.apply_updates(state["model"], jax.tree.map(lambda g: -0.1 * g, gradients))}, value

    def create_one():
        return {"model": eqx.nn.MLP(16, 16, 32, 1, key=KEY)}

    plan = planned(step, eqx.filter_eval_shape(create_one), rows(), mesh=MESH)
    state, _ = plan.jit(step)(plan.init(create_one), rows())
    assert_laid_out(eqx.filter(state, eqx.is_array), plan.out_shardings[0])


def test_a_module_in_place_of_another_argument_is_refused():
    plan = plan_of(mlp_step, mlp(), rows())
    model = eqx.nn.MLP(16, 16, 32, 1, key=KEY)
    for use in (plan.jit(mlp_step), plan.jit(mlp_step).lower):
        with pytest.raises(ValueError, match="the plan has the argument 'params/bias'"):
            use(model, rows())
