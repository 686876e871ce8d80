"""Steps as flat programs: counts, costs, order of operations."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from tests.shard.steps import STEPS, array

from penstock.shard.trace.flat_program import flatten
from penstock.shard.trace.step import trace


def flat(step, *args):
    return flatten(trace(step, args).closed)


def products(program):
    return [op for op in program.ops if op.primitive == "dot_general"]


def test_the_body_of_a_scan_counts_as_often_as_it_runs():
    def step(w, x):
        def turn(h, _):
            return lax.scan(lambda g, _: (jnp.tanh(g @ w), None), h, None, length=5)[0], None

        return lax.scan(turn, x @ w, None, length=3)[0]

    before, inside = products(flat(step, array(8, 8), array(4, 8)))
    assert (before.count, inside.count) == (1, 15)
    assert before.flops == inside.flops == 2 * 4 * 8 * 8


def test_a_while_loop_counts_once_and_is_reported():
    def step(w, x):
        return lax.scan(lambda h, _: (lax.while_loop(lambda h: h.sum() < 9, lambda h: h @ w, h), None), x, length=3)[0]

    program = flat(step, array(8, 8), array(4, 8))
    assert [op.count for op in products(program)] == [3]
    assert program.unknown == ("1 loop of unknown length counts once: the true FLOPs, bytes sent and time are unknown",)


@pytest.mark.parametrize("length", [1, 5])
def test_a_scan_has_a_known_length(length):
    program = flat(lambda w, x: lax.scan(lambda h, _: (h @ w, None), x, length=length)[0], array(8, 8), array(4, 8))
    assert [op.count for op in products(program)] == [length]
    assert program.unknown == ()


def test_operations_of_unknown_cost_are_reported_by_name():
    def step(x):
        doubled = pallas.pallas_call(lambda given, result: None, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
        return jnp.linalg.eigh(doubled), jax.pure_callback(lambda each: each, doubled, doubled)

    (sentence,) = flat(step, array(8, 8)).unknown
    assert sentence.startswith("3 operations of unknown cost count one FLOP for each element of their results (")
    for name in ("pallas_call", "eigh", "pure_callback"):
        assert name in sentence


def test_collectives_inside_of_a_shard_map_are_reported():
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    summed = jax.shard_map(lambda x: lax.psum(x * 2, "x"), mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    (sentence,) = flat(summed, array(8, 8)).unknown
    assert sentence.startswith("1 operation of unknown cost counts")
    assert "psum" in sentence


def test_ordinary_operations_and_random_numbers_have_a_known_cost():
    def step(x, key):
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        y = jax.nn.gelu(jnp.where(kept, x, 0)) + jnp.sort(x)[::-1] + jnp.cumsum(x, 0) + jax.nn.one_hot(x.argmax(1), 8)
        return jax.nn.softmax(jnp.floor(y) ** 3), x.at[jnp.arange(2)].add(1.0), jnp.pad(x, 1), lax.top_k(x, 2)

    assert flat(jax.value_and_grad(lambda x, key: step(x, key)[0].sum()), array(8, 8), jax.random.key(0)).unknown == ()
    assert flat(step, array(8, 8), jax.random.key(0)).unknown == ()


def test_branches_count_as_if_they_ran_equally_often():
    def step(w, x, n):
        return lax.switch(n, [lambda x: x @ w, lambda x: x @ w @ w, lambda x: x], x)

    program = flat(step, array(8, 8), array(4, 8), jnp.int32(0))
    assert [op.count for op in products(program)] == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(
    "wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.jit(f))], ids=["jit", "checkpoint", "jit of jit"]
)
def test_calls_are_inlined(wrap):
    plain = flat(lambda w, x: jnp.tanh(x @ w), array(8, 8), array(4, 8))
    called = flat(wrap(lambda w, x: jnp.tanh(x @ w)), array(8, 8), array(4, 8))
    assert [op.primitive for op in called.ops] == [op.primitive for op in plain.ops]


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_every_value_is_written_once_and_before_it_is_read(make):
    step, state, batch = make()
    program = flat(step, *state, batch)
    known = {
        *program.inputs,
        *program.constants,
        *(pair.inner for pair in program.same_sharding),
        *(pair.outer for pair in program.same_sharding),
    }
    results = [result for op in program.ops for result in op.results]
    assert len(results) == len(set(results))
    literal = set(range(len(program.values))) - set(results) - known  # operands of calls that are literals
    for op in program.ops:
        for operand in op.operands:
            assert operand is None or operand in known or operand in literal
            assert operand is None or operand not in literal or program.values[operand].shape == ()
        known.update(op.results)
    assert len({op.path for op in program.ops}) == len(program.ops)
    assert bool(program.unknown) == (make.__name__ == "while_loop")


def test_slices_of_a_scan_share_the_sharding_of_their_stack():
    program = flat(lambda w, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0], array(3, 8, 8), array(4, 8))
    stack, _ = program.inputs
    (pair,) = (pair for pair in program.same_sharding if pair.outer == stack)
    assert pair.skip == 1
    assert program.values[pair.inner].shape == (8, 8)
