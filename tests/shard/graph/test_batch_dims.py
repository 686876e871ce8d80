"""The batch dimension is followed from the inputs through the graph."""

import jax.numpy as jnp
import pytest
from jax import lax
from tests.shard.steps import array, mlp, mlp_loss, rows

from penstock.shard.graph.roles import find_batch_dims, first_shardable_dim
from penstock.shard.graph.step_model import build_step_model
from penstock.shard.mesh.compiler_models import CPU
from penstock.shard.trace.step import trace


def model_of(step, *args):
    return build_step_model(trace(step, args), {}, CPU)


def test_the_batch_dimension_is_followed_through_products_and_not_into_weights():
    model = model_of(mlp_loss, mlp(), rows(count=12))
    bias, w_in, w_out, x, y = model.inputs
    dims = find_batch_dims(model.graph, [x])
    assert dims[x] == dims[y] == [0]
    assert not {bias, w_in, w_out} & set(dims)
    batch_sizes = {model.graph.nodes[node].sizes[dim] for node, node_dims in dims.items() for dim in node_dims}
    assert batch_sizes == {12}


def test_without_a_batch_input_no_dimension_is_found():
    model = model_of(mlp_loss, mlp(), rows())
    assert find_batch_dims(model.graph, []) == {}


def test_a_dimension_that_a_loop_slices_is_skipped():
    def accumulate(w, microbatches):
        return lax.scan(lambda total, x: (total + jnp.sum(x @ w), None), 0.0, microbatches)[0]

    model = model_of(accumulate, array(16, 16), array(4, 8, 16))
    w, x = model.inputs
    assert first_shardable_dim(model.graph, x) == 1
    assert find_batch_dims(model.graph, [x])[x] == [1]
    assert first_shardable_dim(model.graph, w) == 0


def accumulating(major_first):
    """Return a step that splits its batch into four microbatches and loops over them."""

    def accumulate(w, x):
        microbatches = x.reshape(4, -1, 16) if major_first else x.reshape(-1, 4, 16).swapaxes(0, 1)
        return lax.scan(lambda total, x: (total + jnp.sum(x @ w), None), 0.0, microbatches)[0]

    return accumulate


@pytest.mark.parametrize("major_first", [True, False])
def test_the_rows_of_microbatches_are_the_batch(major_first):
    model = model_of(accumulating(major_first), array(16, 16), array(96, 16))
    dims = find_batch_dims(model.graph, model.inputs[1:])
    (product,) = (
        node for op, node in zip(model.groups.non_elementwise, model.graph.op, strict=True) if op.primitive == "dot_general"
    )
    assert [model.graph.nodes[product].sizes[dim] for dim in dims[product]] == [96 // 4]
    assert dims[model.inputs[1]] == [0]


def test_parts_of_the_batch_that_no_loop_takes_apart_are_sharded_by_the_first():
    def step(w, x):
        return jnp.sum(jnp.einsum("abd,df->abf", x.reshape(8, 12, 16), w) ** 2)

    model = model_of(step, array(16, 32), array(96, 16))
    dims = find_batch_dims(model.graph, model.inputs[1:])
    sizes = {model.graph.nodes[node].sizes[dim] for node, each in dims.items() for dim in each}
    assert sizes == {96, 8}
