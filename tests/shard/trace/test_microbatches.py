"""A step that runs in parts of its batch gives the results of the whole batch, or is refused with the reason."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.errors import SplitError
from penstock.shard.trace.rewriting import Rewriting
from penstock.shard.trace.step import trace

ROWS, WIDTH = 24, 6
PARAMS = {"up": jax.ShapeDtypeStruct((3, WIDTH, 8), "float32"), "down": jax.ShapeDtypeStruct((3, 8, WIDTH), "float32")}
X = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")


def layer(x, weights):
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None


def scanned(params, x):
    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def train(loss):
    """Return a train step that divides the gradients by their norm, which is not linear in them."""

    def step(params, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(each**2) for each in jax.tree.leaves(gradients)))
        return jax.tree.map(lambda old, new: old - 0.1 * new / norm, params, gradients), value

    return step


def project(params, x):
    return x @ params["up"][0]


def recurrent(params, x):
    def cell(hidden, now):
        return jnp.tanh(now @ params["up"][0] + hidden @ params["down"][0] @ params["up"][1]), None

    return jnp.mean(jax.lax.scan(cell, jnp.zeros((x.shape[0], 8)), jnp.stack([x, 2 * x]))[0] ** 2)


def branching(params, x):
    return jax.lax.cond(params["up"][0, 0, 0] > 0, scanned, lambda params, x: jnp.mean(project(params, x)), params, x)


def dropout(params, x):
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, (x.shape[0], 8))
    return jnp.mean(project(params, x) * kept)


def dropout_in_layers(params, x):
    def noisy(carry, weights):
        x, key = carry
        now, later = jax.random.split(key)
        return (layer(x, weights)[0] * jax.random.bernoulli(now, 0.5, x.shape), later), None

    return jnp.mean(jax.lax.scan(jax.checkpoint(noisy), (x, jax.random.key(0)), params)[0][0] ** 2)


def likelihood(params, x):
    labels = jnp.argmax(x, 1)
    return -jnp.mean(jax.nn.log_softmax(project(params, x))[jnp.arange(x.shape[0]), labels])


def groups_of_four(params, x):
    rewards = project(params, x).sum(1).reshape(-1, 4)
    return jnp.mean((rewards - rewards.mean(1, keepdims=True)) ** 2)


def while_loop(params, x):
    def body(state):
        return state[0] + 1, jnp.tanh(project(params, state[1])) @ params["down"][0]

    return jnp.mean(jax.lax.while_loop(lambda state: state[0] < 1 + (params["up"][0, 0, 0] > 0), body, (0, x))[1])


def metrics(params, x):
    out = project(params, x)
    return jnp.mean(out), x.shape[0], out.min(), out.max(), jnp.any(out > 0), jnp.all(out > 0), params["up"] ** x.shape[0]


SPLIT = {
    "scan over layers": train(scanned),
    "checkpoint": train(lambda params, x: jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)),
    "jit": train(jax.jit(scanned)),
    "recurrent": train(recurrent),
    "branches": train(branching),
    "loss with a part that has no rows": train(lambda params, x: scanned(params, x) + 0.1 * jnp.sum(params["up"] ** 2)),
    "mean over rows that a mask keeps": train(
        lambda params, x: jnp.sum(project(params, x) * (x[:, :1] > 0)) / jnp.sum(x[:, 0] > 0)
    ),
    "normalized inputs": train(lambda params, x: jnp.mean(project(params, (x - x.mean(0)) / x.std(0)) ** 2)),
    "dropout": train(dropout),
    "dropout in layers": train(dropout_in_layers),
    "the whole loss in a checkpoint": train(jax.checkpoint(scanned)),
    "a loss that looks up the label of each row": train(likelihood),
    "groups of rows": train(groups_of_four),
    "rows that are not first": train(lambda params, x: scanned(params, jnp.stack([x, 2 * x]).reshape(-1, WIDTH))),
    "a loop of unknown length": while_loop,
    "metrics": metrics,
    "positions of rows in an array": train(lambda params, x: jnp.mean(project(params, x) * np.arange(x.shape[0])[:, None])),
    "rows beside rows of another order": train(lambda params, x: jnp.mean(project(params, x + 0.5 * x[::-1]) ** 2)),
    "positions of rows": train(lambda params, x: jnp.mean(project(params, x) * jnp.arange(x.shape[0])[:, None])),
    "results with rows": lambda params, x: (jax.grad(scanned)(params, x), project(params, x), x.sum(0), x.max(1), x.T),
}


@pytest.mark.parametrize(
    ("name", "count", "groups"), [*((name, 3, 2) for name in SPLIT), ("groups of rows", 2, 1), ("results with rows", 6, 1)]
)
def test_the_results_are_those_of_the_whole_batch(name, count, groups):
    traced = trace(SPLIT[name], (PARAMS, X))
    rng = np.random.default_rng(0)
    arguments = [0.3 * rng.normal(size=leaf.shape).astype(leaf.dtype) for leaf in traced.inputs]
    split = traced.rewritten(Rewriting(count, (2,), groups))
    for expected, result in zip(run(traced.closed, arguments), run(split, arguments), strict=True):
        assert result.dtype == expected.dtype
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    loops = [each for each in split.jaxpr.eqns if each.primitive.name == "scan" and each.params["length"] == count]
    assert len(loops) == 1


def run(closed, arguments):
    return jax.jit(lambda *flat: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *flat))(*arguments)


def test_short_floats_are_added_up_in_float32():
    def step(w, x):
        return jax.grad(lambda w: jnp.sum(x @ w, dtype="float32"))(w)

    traced = trace(step, (jax.ShapeDtypeStruct((1, 1), "bfloat16"), jax.ShapeDtypeStruct((1024, 1), "bfloat16")))
    arguments = [np.ones((1, 1), "bfloat16"), np.ones((1024, 1), "bfloat16")]
    (gradient,) = run(traced.rewritten(Rewriting(512, (1,))), arguments)
    assert gradient.dtype == "bfloat16"
    assert float(gradient[0, 0]) == 1024.0  # sums of bfloat16 end at 256


REFUSED = {
    "batch normalization": (
        lambda params, x: jnp.mean(jax.nn.standardize(project(params, x), axis=0) ** 2),
        "a value over all rows",
    ),
    "contrastive": (lambda params, x: jnp.mean(project(params, x) @ project(params, x).T), "moves or mixes rows"),
    "maximum": (lambda params, x: jnp.max(project(params, x)), "a value over all rows"),
    "order": (lambda params, x: jnp.mean(project(params, x) * project(params, x)[::-1]), "moves or mixes rows"),
    "write to a row": (lambda params, x: jnp.mean(project(params, x).at[0].set(1.0) ** 2), "moves or mixes rows"),
    "differences of rows": (lambda params, x: jnp.mean(project(params, x[1:] - x[:-1])), r"is one of \[11, 6\]"),
    "rows of groups apart": (lambda params, x: jnp.mean(project(params, x).reshape(2, -1, 8)[0]), "different parts"),
    "power of the rows": (lambda params, x: jnp.mean(project(params, x) ** x.shape[0]), "depends on the number of rows"),
    "callback": (
        lambda params, x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((24, 8), "float32"), project(params, x)).sum(),
        "nothing is known about the rows",
    ),
    "whole numbers": (
        lambda params, x: jax.checkpoint(lambda x: jnp.sum(project(params, x)).astype(int))(x),
        "used where it is computed",
    ),
    "loop over rows": (
        lambda params, x: jax.lax.scan(lambda sum, row: (sum + row @ params["up"][0], None), jnp.zeros(8), x)[0][0],
        "a loop",
    ),
    "unknown length": (
        lambda params, x: jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: 2 * x, project(params, x)),
        "a sum over the rows is used where it is computed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_is_no_sum_over_rows_is_refused_with_the_reason(name):
    loss, reason = REFUSED[name]
    step = loss if name in ("unknown length", "callback", "whole numbers") else train(loss)
    with pytest.raises(SplitError, match=reason):
        trace(step, (PARAMS, X)).rewritten(Rewriting(2, (2,)))


def test_a_step_that_needs_its_batch_size_is_refused():
    def step(params, x):
        if x.shape[0] != ROWS:
            raise ValueError("24 rows, please")
        return jnp.mean(project(params, x))

    with pytest.raises(SplitError, match="24 rows, please"):
        trace(step, (PARAMS, X)).rewritten(Rewriting(2, (2,)))
