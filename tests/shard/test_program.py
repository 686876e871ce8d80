"""Steps written out flat."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from tests.shard.steps import STEPS, array

from penstock.shard.axes import groups_of
from penstock.shard.program import program_of
from penstock.shard.trace import trace


def program(step, *args):
    return program_of(trace(step, args).closed)


def products(made):
    return [op for op in made.ops if op.primitive == "dot_general"]


def test_what_a_loop_does_counts_as_often_as_it_runs():
    def step(w, x):
        def turn(h, _):
            return lax.scan(lambda g, _: (jnp.tanh(g @ w), None), h, None, length=5)[0], None

        return lax.scan(turn, x @ w, None, length=3)[0]

    before, inside = products(program(step, array(8, 8), array(4, 8)))
    assert (before.count, inside.count) == (1, 15)
    assert before.flops == inside.flops == 2 * 4 * 8 * 8


def test_a_while_loop_counts_once():
    made = program(lambda w, x: lax.while_loop(lambda h: h.sum() < 9, lambda h: h @ w, x), array(8, 8), array(4, 8))
    assert [op.count for op in products(made)] == [1]


def test_branches_count_as_if_they_took_turns():
    def step(w, x, n):
        return lax.switch(n, [lambda x: x @ w, lambda x: x @ w @ w, lambda x: x], x)

    made = program(step, array(8, 8), array(4, 8), jnp.int32(0))
    assert [op.count for op in products(made)] == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(
    "wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.jit(f))], ids=["jit", "checkpoint", "jit of jit"]
)
def test_calls_are_written_out_in_place(wrap):
    plain = program(lambda w, x: jnp.tanh(x @ w), array(8, 8), array(4, 8))
    called = program(wrap(lambda w, x: jnp.tanh(x @ w)), array(8, 8), array(4, 8))
    assert [op.primitive for op in called.ops] == [op.primitive for op in plain.ops]


def test_slices_of_a_loop_are_tied_to_their_stack_and_carries_to_their_start_and_end():
    made = program(lambda w, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0], array(3, 8, 8), array(4, 8))
    stack, start = made.inputs
    (sliced,) = (tie.inner for tie in made.ties if tie.outer == stack)
    assert [tie.skip for tie in made.ties if tie.outer == stack] == [1]
    assert made.values[sliced].shape == (8, 8)
    groups = groups_of(made)
    carried = groups.group[start]
    assert groups.group[made.outputs[0]] == carried
    assert groups.group[products(made)[0].operands[0]] == carried


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_every_value_is_made_once_and_before_it_is_read(make):
    step, state, batch = make()
    made = program(step, *state, batch)
    known = {*made.inputs, *made.constants, *(tie.inner for tie in made.ties), *(tie.outer for tie in made.ties)}
    results = [result for op in made.ops for result in op.results]
    assert len(results) == len(set(results))
    literal = set(range(len(made.values))) - set(results) - known  # operands of calls that are literals
    for op in made.ops:
        for operand in op.operands:
            assert operand is None or operand in known or operand in literal
            assert operand is None or operand not in literal or made.values[operand].shape == ()
        known.update(op.results)
    assert len({op.path for op in made.ops}) == len(made.ops)


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_values_of_a_group_have_the_sizes_that_it_has(make):
    step, state, batch = make()
    made = program(step, *state, batch)
    groups = groups_of(made)
    for number, value in enumerate(made.values):
        group = groups.groups[groups.group[number]]
        for dim, size in zip(groups.dims[number], value.shape, strict=True):
            assert dim is None or group.sizes[dim] == size
        placed = [dim for dim in groups.dims[number] if dim is not None]
        assert len(set(placed)) == len(placed)
    assert sum(len(group.elementwise) for group in groups.groups if group is not None) + len(groups.anchors) == len(made.ops)
