"""Steps written out flat."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from tests.shard.steps import STEPS, array

from penstock.shard.graph.axis_groups import find_axis_groups
from penstock.shard.trace.flat_program import flatten
from penstock.shard.trace.step import trace


def program(step, *args):
    return flatten(trace(step, args).closed)


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


def test_a_while_loop_counts_once_and_is_told():
    def step(w, x):
        return lax.scan(lambda h, _: (lax.while_loop(lambda h: h.sum() < 9, lambda h: h @ w, h), None), x, length=3)[0]

    made = program(step, array(8, 8), array(4, 8))
    assert [op.count for op in products(made)] == [3]
    assert made.unknown == ("1 loop of unknown length counts once: the true FLOPs, bytes sent and time are unknown",)


@pytest.mark.parametrize("length", [1, 5])
def test_a_scan_has_a_known_length(length):
    made = program(lambda w, x: lax.scan(lambda h, _: (h @ w, None), x, length=length)[0], array(8, 8), array(4, 8))
    assert [op.count for op in products(made)] == [length]
    assert made.unknown == ()


def test_operations_of_unknown_cost_are_told_by_name():
    def step(x):
        doubled = pallas.pallas_call(lambda given, made: None, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
        return jnp.linalg.eigh(doubled), jax.pure_callback(lambda each: each, doubled, doubled)

    (sentence,) = program(step, array(8, 8)).unknown
    assert sentence.startswith("3 operations of unknown cost count one FLOP for each element of their results (")
    for name in ("pallas_call", "eigh", "pure_callback"):
        assert name in sentence


def test_what_devices_exchange_inside_of_a_shard_map_is_told():
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    summed = jax.shard_map(lambda x: lax.psum(x * 2, "x"), mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    (sentence,) = program(summed, array(8, 8)).unknown
    assert sentence.startswith("1 operation of unknown cost counts")
    assert "psum" in sentence


def test_ordinary_operations_and_random_numbers_have_a_known_cost():
    def step(x, key):
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        y = jax.nn.gelu(jnp.where(kept, x, 0)) + jnp.sort(x)[::-1] + jnp.cumsum(x, 0) + jax.nn.one_hot(x.argmax(1), 8)
        return jax.nn.softmax(jnp.floor(y) ** 3), x.at[jnp.arange(2)].add(1.0), jnp.pad(x, 1), lax.top_k(x, 2)

    assert program(jax.value_and_grad(lambda x, key: step(x, key)[0].sum()), array(8, 8), jax.random.key(0)).unknown == ()
    assert program(step, array(8, 8), jax.random.key(0)).unknown == ()


def test_the_steps_of_these_tests_leave_open_what_they_are_made_to():
    left_open = {make.__name__ for make in STEPS if program(make()[0], *make()[1], make()[2]).unknown}
    assert left_open == {"while_loop"}


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
    (sliced,) = (tie.inner for tie in made.same_sharding if tie.outer == stack)
    assert [tie.skip for tie in made.same_sharding if tie.outer == stack] == [1]
    assert made.values[sliced].shape == (8, 8)
    groups = find_axis_groups(made)
    carried = groups.group[start]
    assert groups.group[made.outputs[0]] == carried
    assert groups.group[products(made)[0].operands[0]] == carried


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_every_value_is_made_once_and_before_it_is_read(make):
    step, state, batch = make()
    made = program(step, *state, batch)
    known = {
        *made.inputs,
        *made.constants,
        *(tie.inner for tie in made.same_sharding),
        *(tie.outer for tie in made.same_sharding),
    }
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
    groups = find_axis_groups(made)
    for number, value in enumerate(made.values):
        group = groups.groups[groups.group[number]]
        for dim, size in zip(groups.dims[number], value.shape, strict=True):
            assert dim is None or group.sizes[dim] == size
        placed = [dim for dim in groups.dims[number] if dim is not None]
        assert len(set(placed)) == len(placed)
    assert sum(len(group.elementwise) for group in groups.groups if group is not None) + len(groups.non_elementwise) == len(
        made.ops
    )
