import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import penstock as ps
from penstock.shard.graph.scheduling import find_reuse
from penstock.shard.mesh.hardware import find_hardware
from penstock.shard.trace.step import trace

STEPS, ROWS, WIDTH = 16, 64, 1024
W = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
XS = jax.ShapeDtypeStruct((STEPS, ROWS, WIDTH), jnp.float32)
BYTES = WIDTH * WIDTH * 4


def run_rnn(w, xs, cell=lambda h, w: jnp.tanh(h @ w)):
    return jnp.mean(lax.scan(lambda h, x: (cell(h, w) + x, None), jnp.zeros((ROWS, WIDTH)), xs)[0] ** 2)


def train_rnn(w, xs):
    value, gradient = jax.value_and_grad(run_rnn)(w, xs)
    return w - gradient, value


def reused(step, *args):
    """Return (primitive, shape of the array, turns, bytes held) for all that is reused."""
    program = trace(step, args).program
    return sorted(
        (program.ops[index].primitive, program.values[value].shape, reuse.iterations, reuse.bytes)
        for (index, value), reuse in find_reuse(program).items()
    )


def test_the_weight_of_an_rnn_is_reused_in_each_iteration():
    assert reused(run_rnn, W, XS) == [("dot_general", (WIDTH, WIDTH), STEPS, BYTES)]


@pytest.mark.parametrize("change", [lambda w: w.T, lambda w: 2 * w, lambda w: w.astype(jnp.bfloat16).astype(jnp.float32)])
def test_so_is_what_is_computed_from_it(change):
    step = lambda w, xs: run_rnn(w, xs, lambda h, w: h @ change(w))  # noqa: E731
    assert reused(step, W, XS) == [("dot_general", (WIDTH, WIDTH), STEPS, BYTES)]


def test_the_backward_pass_reuses_the_weight_and_the_sum_of_its_gradients():
    name, both = "dot_general", 2 * BYTES
    assert reused(train_rnn, W, XS) == [
        ("add_any", (WIDTH, WIDTH), STEPS, both),
        (name, (WIDTH, WIDTH), STEPS, BYTES),  # the forward pass
        (name, (WIDTH, WIDTH), STEPS, both),
        (name, (WIDTH, WIDTH), STEPS, both),
    ]


@pytest.mark.parametrize(
    "step",
    [
        lambda w, xs: lax.scan(lambda h, x: (h @ x, None), w, jnp.zeros((3, WIDTH, WIDTH)))[0],  # a layer of a stack each
        lambda w, xs: lax.scan(lambda h, x: ((h @ h) + x[:1, :1], None), w, xs)[0],  # each iteration changes it
        lambda w, xs: lax.while_loop(lambda h: h.sum() < 3, lambda h: jnp.tanh(w @ w) + h, w),  # of unknown length
    ],
)
def test_what_changes_or_runs_for_an_unknown_time_is_not(step):
    assert reused(step, W, XS) == []


def test_a_loop_inside_of_a_loop_counts_by_itself():
    def step(w, xs):
        inner = lambda h, x: lax.scan(lambda h, _: (jnp.tanh(h @ w) + x, None), h, None, length=5)[0]  # noqa: E731
        return lax.scan(lambda h, x: (inner(h, x), None), jnp.zeros((ROWS, WIDTH)), xs)[0]

    assert reused(step, W, XS) == [("dot_general", (WIDTH, WIDTH), 5, BYTES)]


def data_parallel(vector_memory):
    hardware = dataclasses.replace(find_hardware("tpu-v5e"), fast_memory=vector_memory)
    xs = jax.ShapeDtypeStruct((ROWS, STEPS, WIDTH), jnp.float32)
    step = lambda w, xs: train_rnn(w, xs.swapaxes(0, 1))  # noqa: E731
    return ps.plan(step, W, xs, mesh={"data": 8}, hardware=hardware, check=False).baselines["data parallel"].compute


def test_what_fits_into_the_vector_memory_is_moved_once():
    """A weight is read in both passes, and the sum of gradients is read and written: over all iterations, or once."""
    moved_once, moved_each_time = data_parallel(1 << 30), data_parallel(BYTES)
    bandwidth = find_hardware("tpu-v5e").memory_bandwidth
    assert moved_each_time - moved_once >= (STEPS - 1) * 4 * BYTES / bandwidth
