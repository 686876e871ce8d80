"""The first non-elementwise use of each input."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from tests.shard.steps import array

from penstock.shard.graph.axis_groups import find_axis_groups, find_uses
from penstock.shard.trace.step import trace

MESH = NamedSharding(jax.make_mesh((1,), ("x",)), PartitionSpec())


def first_uses(step, *args):
    """Return the first use of each input, or None, in the order of the inputs."""
    program = trace(step, args).program
    uses = find_uses(program, find_axis_groups(program)).first
    return [uses.get(value) for value in program.inputs]


def slices(step, *args):
    """Return the number of slices that loops take of each input."""
    program = trace(step, args).program
    found = find_uses(program, find_axis_groups(program)).slices
    return [found[value] for value in program.inputs]


def chain(ws, x):
    """Multiply by each matrix of a stack."""
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]


def test_casts_are_skipped():
    x, w = first_uses(lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), array(8, 4), array(4, 6))
    assert x.op.primitive == w.op.primitive == "dot_general"
    assert (x.sums_over(0), x.sums_over(1)) == (False, True)
    assert (w.sums_over(0), w.sums_over(1)) == (True, False)


def test_an_input_that_is_only_added_has_no_such_use():
    assert first_uses(lambda x, b: jnp.tanh(x + b), array(8, 4), array(8, 4)) == [None, None]


def test_a_table_is_first_used_by_the_lookup():
    table, index = first_uses(lambda table, index: table[index], array(8, 4), jnp.arange(3))
    assert table.op.primitive == "gather"
    assert (table.sums_over(0), table.sums_over(1)) == (True, False)
    assert index is None or index.op.primitive == "gather"


def test_the_slices_of_a_stack_count_as_the_stack():
    stack, _ = first_uses(chain, array(3, 8, 8), array(4, 8))
    assert stack.dims == (None, 0, 1)
    assert [stack.sums_over(dim) for dim in range(3)] == [False, True, False]


@pytest.mark.parametrize(
    ("read", "shape", "dims"),
    [
        (lambda w: w.T, (6, 4), (1, 0)),
        (lambda w: w.T.astype(jnp.bfloat16).astype(jnp.float32), (6, 4), (1, 0)),
        (lambda w: 2.0 * w, (4, 6), (0, 1)),
        (lambda w: w[0], (1, 4, 6), (None, 0, 1)),
        (lambda w: w[:, 1], (4, 2, 6), (0, None, 1)),
        (lambda w: w.reshape(4, 6), (4, 2, 3), (0, 1, None)),
        (lambda w: w.reshape(4, 6), (2, 2, 6), (0, None, 1)),
        (lambda w: w.reshape(3, 2, 4).transpose(2, 0, 1).reshape(4, 6), (6, 4), (1, 0)),
        (lambda w: jnp.split(w, 2, axis=1)[1], (4, 12), (0, None)),
        (lambda w: lax.optimization_barrier((w, w.T))[1], (6, 4), (1, 0)),
        (lambda w: lax.with_sharding_constraint(w.T, MESH), (6, 4), (1, 0)),
        (jax.jit(lambda w: w.T), (6, 4), (1, 0)),
        (jax.checkpoint(lambda w: w.T), (6, 4), (1, 0)),
    ],
)
def test_transposed_reshaped_and_selected_inputs_keep_their_own_dimensions(read, shape, dims):
    """Check products of [8, 4] with weights that are read as [4, 6]: the dimension of size 4 is contracted."""
    _, w = first_uses(lambda x, w: x @ read(w), array(8, 4), array(*shape))
    assert w.op.primitive == "dot_general"
    assert w.dims == dims
    contracted, free = dims.index(0), next((at for at, dim in enumerate(dims) if dim == 1), None)
    assert [dim for dim in range(len(shape)) if w.sums_over(dim)] == [contracted]
    assert free is None or w.factor(free) in w.op.rule.results[0]


@pytest.mark.parametrize(
    ("step", "shape", "count"),
    [
        (chain, (6, 8, 8), 6),
        (jax.checkpoint(chain), (6, 8, 8), 6),
        (lambda ws, x: jax.grad(lambda ws: chain(ws, x).sum())(ws), (6, 8, 8), 6),
        (lambda ws, x: chain(ws, chain(ws, x)), (6, 8, 8), 6),
        (lambda ws, x: chain(ws.astype(jnp.bfloat16).transpose(1, 2, 0).transpose(2, 0, 1), x), (6, 8, 8), 6),
        (lambda ws, x: lax.scan(lambda h, ws: (chain(ws, h), None), x, ws.reshape(2, 3, 8, 8))[0], (6, 8, 8), 6),
        (lambda ws, x: lax.scan(lambda h, ws: (chain(ws, h), None), x, ws)[0], (2, 3, 8, 8), 6),
        (lambda ws, x: lax.scan(lambda h, _: (chain(ws, h), None), x, length=5)[0], (6, 8, 8), 6),
        (lambda bs, x: lax.scan(lambda h, b: (jnp.tanh(h + b), None), x, bs)[0], (6, 8), 6),
        (lambda w, x: lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=6)[0], (8, 8), 1),
        (chain, (0, 8, 8), 1),
    ],
)
def test_loops_take_as_many_slices_as_there_are_layers(step, shape, count):
    assert slices(step, array(*shape), array(4, 8).astype(jnp.float32)) == [count, 1]


def test_a_weight_that_is_combined_with_another_is_no_alias():
    assert first_uses(lambda x, w, v: x @ (w + v), array(8, 4), array(4, 6), array(4, 6))[1:] == [None, None]
