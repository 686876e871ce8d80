"""Partial results that are only added to each other are summed over devices once."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from penstock.shard.graph.axis_groups import find_axis_groups
from penstock.shard.graph.scheduling import find_joint_sums
from penstock.shard.mesh.compiler_models import CPU, GPU, TPU
from penstock.shard.mesh.hardware import find_hardware
from penstock.shard.search.baselines import DATA_PARALLEL
from penstock.shard.search.costs import predict_cost
from penstock.shard.search.solver import prepare_meshes
from penstock.shard.trace.step import trace

WIDTH = 256
X = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
HALF = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
IDS = jax.ShapeDtypeStruct((WIDTH,), jnp.int32)


def joint(step, *args):
    """Return the number of partial results of each joint sum of a step."""
    program = trace(step, args).program
    found = list(find_joint_sums(program, find_axis_groups(program)).values())
    return sorted(found.count(value) for value in set(found))


@pytest.mark.parametrize(
    ("step", "sizes"),
    [
        (lambda x: x @ x + x.T @ x, [2]),
        (lambda x: (x @ x + x.T @ x) + (x @ x.T + x.sum() * x @ x), [4]),
        (lambda x: ((x @ x + x.T @ x) + x) + x @ x, [2]),  # the last one is added to a full array
        (lambda x: (x @ x + x) + x.T @ x, []),
        (lambda x: (x @ x).T.T + x.T @ x, [2]),
        (lambda x: jnp.sum(x, 0) + jnp.sum(x * x, 0), [2]),
        (lambda x: (lambda y: y + y)(x @ x), []),
        (lambda x: (lambda y: (y + x.T @ x, y))(x @ x), []),  # something else reads the first
        (lambda x: x @ x - x.T @ x, []),
        (lambda x: 2 * (x @ x) + x.T @ x, []),
        (lambda x: (x @ x).T + x.T @ x, []),  # another order of dimensions
        (lambda x: jnp.tanh(x @ x) + x.T @ x, []),
        (lambda x: jnp.sort(x) + x @ x, []),  # no sum over devices
        (lambda x: lax.scan(lambda h, w: (jnp.tanh(h @ w + h.T @ w), None), x, x[None])[0], [2]),
    ],
)
def test_partial_results_that_are_only_added_as_they_are_have_a_joint_sum(step, sizes):
    assert joint(step, X) == sizes


def test_a_partial_result_that_is_converted_is_summed_before():
    assert joint(lambda x, y: (x @ x).astype("float32") + y @ y, HALF, X) == []


def tied(table, ids):
    """Return a table after a step of gradient descent, which is both the embedding and the last layer."""

    def loss(table):
        return -jnp.mean(jax.nn.log_softmax(table[ids] @ table.T)[:, 0])

    value, gradient = jax.value_and_grad(loss)(table)
    return table - gradient, value


@pytest.mark.parametrize(("compiler", "sums"), [(TPU, 1), (GPU, 1), (CPU, 2)])
def test_the_gradient_of_a_tied_weight_is_sent_once_where_the_compiler_adds_its_parts_first(compiler, sums):
    traced = trace(tied, (jax.ShapeDtypeStruct((512, WIDTH), jnp.float32), IDS))
    (mesh,) = prepare_meshes(traced, [{"data": 8}], find_hardware("tpu-v5e"), {"ids": jax.P("data")}, {}, compiler)
    cost = predict_cost(mesh.costs, mesh.baselines[DATA_PARALLEL], mesh.roles, mesh.model.inputs, ())
    sent = sum(each.bytes_on_wire for each in cost.collectives)
    assert sent == pytest.approx(sums * 2 * 7 / 8 * 4 * 512 * WIDTH, rel=0.01)
