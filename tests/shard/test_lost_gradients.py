"""A step that computes gradients and returns no state that depends on them gets a warning."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from tests.shard.eager import MESHES, planned
from tests.shard.steps import STEPS, array, mlp, mlp_loss, mlp_step, rows, sgd

from penstock.shard.remarks import describe_lost_gradients
from penstock.shard.trace.step import trace


def forgets(params, batch):
    _, loss = mlp_step(params, batch)
    return loss, loss


def returns_old_parameters(params, batch):
    new, loss = mlp_step(params, batch)
    return params, loss, jnp.sqrt(sum(jnp.sum((new[name] - params[name]) ** 2) for name in params))


def forgets_in_a_scan(params, batch):
    def turn(loss, layer):
        value, _ = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(layer)
        return loss + value, None

    return lax.scan(turn, 0.0, params)[0]


def forgets_in_a_branch(params, batch):
    return lax.cond(batch["x"][0, 0] > 0, lambda: forgets(params, batch)[0], lambda: 0.0)


def forgets_some(params, frozen, batch):
    loss, _ = jax.value_and_grad(mlp_loss)(frozen, batch)
    return jax.tree.map(lambda w: w * 0.9, params), loss


def drops_parameters(params, momentum, batch, dtype=jnp.float32):
    loss, gradients = jax.value_and_grad(mlp_loss)(params, batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    jax.tree.map(lambda p, m: (p - 0.1 * m).astype(dtype), params, momentum)
    return momentum, loss


def accumulates(params, total, batch):
    loss, gradients = jax.value_and_grad(mlp_loss)(params, batch)
    return jax.tree.map(jnp.add, total, gradients), loss


def decays_frozen_weights(params, frozen, batch):
    def loss(both):
        decay = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(both))
        return mlp_loss(jax.tree.map(jnp.add, *both), batch) + 1e-3 * decay

    return sgd(params, jax.grad(loss)((params, frozen))[0])


def gradient_penalty(w, x):
    return jnp.mean(jax.vmap(jax.grad(lambda row: jnp.sum(jnp.tanh(row @ w))))(x["x"]) ** 2)


def gradients_themselves(params, batch):
    return [leaf.ravel() for leaf in jax.tree.leaves(jax.grad(mlp_loss)(params, batch))]


LOST = {
    "forgotten": (forgets, mlp(), rows()),
    "for their norm": (returns_old_parameters, mlp(), rows()),
    "in jit": (jax.jit(lambda params, batch: jax.jit(forgets)(params, batch)[0]), mlp(), rows()),
    "in a scan": (forgets_in_a_scan, array(3, 16, 16), rows()),
    "in a branch": (forgets_in_a_branch, mlp(), rows()),
    "of frozen weights": (forgets_some, mlp(), mlp(16, 48), rows()),
}
DROPPED = {
    "in jit": jax.jit(drops_parameters),
    "and returned as they were": lambda params, *rest: (params, *drops_parameters(params, *rest)),
    "in another type": lambda params, *rest: drops_parameters(params, *rest, dtype=jnp.bfloat16),
}
KEPT = {
    **{make.__name__: make for make in STEPS},
    "the loss": lambda: (mlp_loss, (mlp(),), rows()),
    "an accumulator": lambda: (accumulates, (mlp(), mlp()), rows()),
    "of frozen weights too": lambda: (decays_frozen_weights, (mlp(), mlp()), rows()),
    "gradients": lambda: (jax.grad(mlp_loss), (mlp(),), rows()),
    "flat gradients": lambda: (gradients_themselves, (mlp(),), rows()),
    "a gradient penalty": lambda: (gradient_penalty, (array(16, 16),), rows()),
    "forces": lambda: (lambda x: jax.grad(lambda x: jnp.sum(jnp.tanh(x) ** 2))(x)[:, :3], (), array(16, 4)),
    "one number": lambda: (lambda w, x: sgd(w, jax.grad(lambda w: jnp.sum(w * x["x"]))(w)), (jnp.float32(1.0),), rows()),
}


@pytest.mark.parametrize("case", LOST)
def test_lost_gradients_are_warned_of(case):
    step, *args = LOST[case]
    results = "only scalars" if case == "for their norm" else "no results"
    with pytest.warns(UserWarning, match=f"gradients, and {results} that .* on them, so it does not train: return") as caught:
        planned(step, *args, mesh=MESHES[0])
    assert [each.filename for each in caught] == [__file__]


@pytest.mark.parametrize("case", DROPPED)
def test_new_parameters_that_are_dropped_are_warned_of(case):
    with pytest.warns(UserWarning, match=r"a new value of 'params/bias' and 2 more from gradients, .* return the new parameters"):
        planned(DROPPED[case], mlp(), mlp(), rows(), mesh=MESHES[0])


@pytest.mark.parametrize("case", KEPT)
def test_gradients_that_are_used_are_not_warned_of(case):
    step, state, batch = KEPT[case]()
    assert describe_lost_gradients(trace(step, (*state, batch))) is None


def test_a_step_is_warned_of_when_it_is_planned_only():
    with pytest.warns(UserWarning, match="computes gradients"):
        plan = planned(forgets, mlp(), rows(), mesh=MESHES[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.bind(forgets, mlp(), rows())
        plan.jit(forgets)(mlp(), rows())
