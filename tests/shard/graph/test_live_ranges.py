"""What lies in memory when, and what is read and written, counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from penstock.shard.graph.fusion import hbm_traffic, materialized_values
from penstock.shard.graph.live_ranges import TEMP_FACTOR
from penstock.shard.graph.step_model import build_step_model
from penstock.shard.mesh.lookup import find_hardware
from penstock.shard.search.problem import build_problem
from penstock.shard.trace.step import trace

MB = 1 << 20


def square(dtype=jnp.float32):
    """1 MiB."""
    return jax.ShapeDtypeStruct((512, 512), dtype)


def problem(step, *args):
    return build_problem(build_step_model(trace(step, args), {}), {"data": 2}, find_hardware("tpu-v5e"))


def most(step, *args):
    """Bytes beside what is stored, when memory is fullest and nothing is sharded."""
    made = problem(step, *args)
    start = made.start()
    return (made.memory(start)[0] - made.local_bytes(start)[1]) / TEMP_FACTOR


def moved(step, *args):
    program = build_step_model(trace(step, args), {}).program
    return {op.primitive: size for op, size in zip(program.ops, hbm_traffic(program), strict=True)}


def test_what_is_given_is_stored_and_what_is_returned_lies_beside_it():
    assert most(lambda x: x @ x, square()) == pytest.approx(MB, rel=1e-3)


def test_elementwise_operations_take_no_memory_of_their_own():
    assert most(lambda x: jnp.sum(jnp.tanh(x) * 2 + 1), square()) < MB / 100


def test_a_chain_of_products_holds_two_at_a_time():
    def chain(x):
        for _ in range(6):
            x = x @ x
        return x

    assert most(chain, square()) == pytest.approx(2 * MB, rel=1e-3)


def test_what_is_needed_later_lives_until_then():
    def apart(x):
        first = x @ x
        second = first @ x
        third = second @ x
        return third @ first

    assert most(apart, square()) == pytest.approx(3 * MB, rel=1e-3)


def test_new_state_takes_the_place_of_the_old():
    def step(w, x):
        gradient = x @ x
        return w - gradient, 0.0

    assert most(step, square(), square()) == pytest.approx(MB, rel=1e-3)


def test_bfloat16_takes_half():
    assert most(lambda x: x @ x, square(jnp.bfloat16)) == pytest.approx(MB / 2, rel=1e-3)


def test_what_a_loop_stacks_is_there_as_a_whole():
    def step(x):
        return lax.scan(lambda h, _: (h @ x, h @ x), x, None, length=8)[1]

    assert 8 * MB <= most(step, square()) <= 12 * MB


def test_peak_memory_is_never_less_than_what_is_stored():
    for step, args in ((lambda x: x, (square(),)), (lambda x, y: x.sum(), (square(), square())), (lambda: 1.0, ())):
        made = problem(step, *args)
        start = made.start()
        assert made.memory(start)[0] >= made.local_bytes(start)[1] == sum(4 * np.prod(each.shape) for each in args)


def test_no_array_ends_before_it_starts():
    def step(w, x):
        def loss(w):
            return jnp.mean(lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), h)), x, w)[0] ** 2)

        return jax.grad(loss)(w)

    live_ranges = problem(
        step, jax.ShapeDtypeStruct((3, 64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)
    ).live_ranges
    assert (live_ranges.start <= live_ranges.end).all()
    assert (live_ranges.start >= 0).all()
    assert (live_ranges.end < live_ranges.steps).all()


def test_a_product_reads_its_operands_and_writes_its_result():
    assert moved(lambda x: x @ x, square())["dot_general"] == 2 * MB  # one operand, read as both
    assert moved(lambda x, y: x @ y, square(), square())["dot_general"] == 3 * MB


def test_what_is_fused_into_a_sum_is_read_once():
    found = moved(lambda x, y: jnp.sum(x * y + 1, axis=0), square(), square())
    assert found == {"mul": 0, "add": 0, "reduce_sum": 2 * MB + 512 * 4}


def test_names_of_the_same_memory_move_nothing():
    found = moved(lambda x: x.T.reshape(-1)[None].sum(), square())
    assert {found.get(name, 0) for name in ("transpose", "reshape", "broadcast_in_dim")} == {0}
    assert found["reduce_sum"] == MB + 4


def test_a_lookup_touches_what_it_takes():
    table, rows = jax.ShapeDtypeStruct((1_000_000, 64), jnp.float32), jax.ShapeDtypeStruct((128,), jnp.int32)
    assert moved(lambda table, rows: table[rows], table, rows)["gather"] == 2 * 128 * 64 * 4


def test_what_many_read_is_computed_once():
    def step(x):
        shared = jnp.exp(x)
        return shared @ x, jnp.sum(shared * 2), jnp.max(shared), jnp.min(shared)

    program = build_step_model(trace(step, (square(),)), {}).program
    (exp,) = (op for op in program.ops if op.primitive == "exp")
    assert exp.results[0] in materialized_values(program)[0]
