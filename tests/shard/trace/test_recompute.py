"""A step that computes values of its forward pass again gives the same results, and keeps less for its backward pass."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shard.trace.lines import Lines
from penstock.shard.trace.recompute import Recomputation, ScanLoop, backward_paths, is_scan, recompute

PARAMS = {"up": jax.ShapeDtypeStruct((4, 8, 16), "float32"), "down": jax.ShapeDtypeStruct((4, 16, 8), "float32")}
X = jax.ShapeDtypeStruct((16, 8), "float32")


def layer(x, weights):
    return x + jnp.tanh(jax.nn.silu(x @ weights["up"]) @ weights["down"]), None


def unrolled(params, x):
    for number in range(4):
        x, _ = layer(x, jax.tree.map(lambda weight, at=number: weight[at], params))
    return jnp.mean(x**2)


def scanned(params, x):
    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def two_scans(params, x):
    """The second loop reads the stack of the first in the forward pass too."""
    last, hidden = jax.lax.scan(lambda x, weights: (layer(x, weights)[0], x), x, params)

    def second(x, each):
        weights, before = each
        return jnp.sin(x * before @ weights["up"]) @ weights["down"], x.sum()

    last, sums = jax.lax.scan(second, last, (params, hidden))
    return jnp.mean(last**2) + sums.sum()


def recurrent(params, x):
    def cell(hidden, now):
        return jnp.tanh(now @ params["up"][0] + hidden @ params["down"][0] @ params["up"][1]), hidden

    last, hidden = jax.lax.scan(cell, jnp.zeros((4, 16)), x.reshape(4, -1, 8))
    return jnp.mean(last**2) + jnp.mean(hidden)


def train(loss):
    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda old, new: old - 0.1 * new, params, gradients), value

    return step


def in_parts(params, x):
    def add(sums, rows):
        value, gradients = jax.value_and_grad(scanned)(params, rows)
        return jax.tree.map(jnp.add, sums, (value, gradients)), value

    zeros = jnp.float32(0), jax.tree.map(lambda weight: jnp.zeros(weight.shape), params)
    return jax.lax.scan(add, zeros, x.reshape(4, -1, 8))


STEPS = {
    "unrolled": train(unrolled),
    "scanned": train(scanned),
    "two scans": train(two_scans),
    "recurrent": train(recurrent),
    "checkpoint": train(lambda params, x: jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)),
    "jit": train(jax.jit(unrolled)),
    "in parts": in_parts,
}


def scope_of(closed):
    """Return the path of the scope that has the backward pass, its lines, and the number of the first of its backward pass."""
    backward = backward_paths(closed.jaxpr)
    path, body = (), closed
    if not any(len(each) == 1 for each in backward) and any(part == "body" for each in backward for part in each):
        first = min(backward, key=len)
        path = first[: first.index("body") + 1]
        body = closed.jaxpr.eqns[path[0]].params["jaxpr"]
    lines = Lines.of(body, path)
    cut = next(at for at, line in enumerate(lines.lines) if any(line.path[:end] in backward for end in range(len(line.path) + 1)))
    return path, lines, cut


@pytest.mark.parametrize("name", STEPS)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_the_results_are_the_same_whatever_is_computed_again(name, data):
    closed, arguments, results = traced_and_run(name)
    path, lines, cut = scope_of(closed)
    forward = [line for line in lines.lines[:cut] if not is_scan(line)]
    forward += itertools.chain(*(ScanLoop(line).body.lines for line in lines.lines[:cut] if is_scan(line)))
    places = [(line.path, number) for line in forward for number in range(len(line.results))]
    chosen = data.draw(st.lists(st.sampled_from(places), unique=True))
    again = recompute(closed, [Recomputation(path, lines.lines[cut].path, tuple(chosen))])
    for expected, result in zip(results, run(again, arguments), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@functools.cache
def traced_and_run(name):
    closed = jax.make_jaxpr(STEPS[name])(PARAMS, X)
    rng = np.random.default_rng(0)
    arguments = [0.3 * rng.normal(size=each.aval.shape).astype("float32") for each in closed.jaxpr.invars]
    return closed, arguments, run(closed, arguments)


def run(closed, arguments):
    return jax.jit(lambda *flat: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *flat))(*arguments)


def test_a_loop_over_layers_stacks_only_what_is_kept():
    closed = jax.make_jaxpr(STEPS["scanned"])(PARAMS, X)
    path, lines, cut = scope_of(closed)
    forward, backward = (next(filter(is_scan, each)) for each in (lines.lines[:cut], lines.lines[cut:]))
    values = tuple((line.path, number) for line in ScanLoop(forward).body.lines for number in range(len(line.results)))
    again = recompute(closed, [Recomputation(path, lines.lines[cut].path, values)])
    loops = [each for each in again.jaxpr.eqns if each.primitive.name == "scan"]
    assert len(loops) == 2
    stacks = [variable.aval.shape for variable in loops[0].outvars if variable.aval.shape[:1] == (4,)]
    assert stacks == [(4, 16, 8)]  # the input of each layer
    assert sum(len(variable.aval.shape) == 3 for variable in forward.equation.outvars) > len(stacks)
    products = [each.primitive.name for each in loops[1].params["jaxpr"].jaxpr.eqns].count("dot_general")
    assert products == [each.primitive.name for each in backward.equation.params["jaxpr"].jaxpr.eqns].count("dot_general") + 2
