"""The first non-elementwise use of each input."""

import jax.numpy as jnp
from jax import lax
from tests.shard.steps import array

from penstock.shard.graph.axis_groups import find_axis_groups
from penstock.shard.graph.first_use import find_first_uses
from penstock.shard.trace.step import trace


def first_uses(step, *args):
    """Return the first use of each input, or None, in the order of the inputs."""
    program = trace(step, args).program
    uses = find_first_uses(program, find_axis_groups(program))
    return [uses.get(value) for value in program.inputs]


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
    stack, _ = first_uses(lambda ws, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0], array(3, 8, 8), array(4, 8))
    assert stack.scan_dims == 1
    assert [stack.sums_over(dim) for dim in range(3)] == [False, True, False]
