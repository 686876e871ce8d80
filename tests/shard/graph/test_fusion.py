"""Stored values, counted by hand."""

import jax
import jax.numpy as jnp
import pytest

from penstock.shard.graph.fusion import fuse
from penstock.shard.mesh.compiler_models import CPU, GPU, TPU
from penstock.shard.trace.step import trace

MB = 1 << 20


def square(dtype=jnp.float32):
    """Return a matrix of 1 MiB in float32."""
    return jax.ShapeDtypeStruct((512, 512), dtype)


def stored(compiler, step, *args):
    """Return the primitives of the stored values, with the fraction of their bytes that is stored."""
    traced = trace(step, args)
    writer = {result: op.primitive for op in traced.program.ops for result in op.results}
    found = fuse(traced.program, traced.state, compiler).buffers
    return sorted(
        (writer.get(each.value, "loop"), each.share) for each in found if traced.program.values[each.value].bytes >= MB / 2
    )


def softmax_gradient(x, y):
    return jax.grad(lambda x: jnp.sum(jax.nn.softmax(x @ x) * y))(x)


def test_a_tpu_computes_the_exponentials_of_a_softmax_again_and_a_cpu_stores_them():
    assert "exp" not in dict(stored(TPU, softmax_gradient, square(), square()))
    assert "exp" in dict(stored(CPU, softmax_gradient, square(), square()))


@pytest.mark.parametrize("compiler", [CPU, GPU])
def test_an_exponential_is_stored_for_several_fusions_and_not_for_several_operations_of_one(compiler):
    def one(x, y):
        power = jnp.exp(x @ y)
        return (power * (1 - power)) @ y

    def several(x, y):
        power = jnp.exp(x @ y)
        return (power * (1 - power)) @ ((power + 1) @ y)

    assert "exp" not in dict(stored(compiler, one, square(), square()))
    assert "exp" in dict(stored(compiler, several, square(), square()))


def test_a_tpu_keeps_half_of_what_only_products_read():
    def step(x, y):
        hidden = x @ y
        return (hidden @ y) @ hidden

    assert ("dot_general", 0.5) in stored(TPU, step, square(), square())
    assert {share for _, share in stored(CPU, step, square(), square())} == {1.0}


@pytest.mark.parametrize("precision", ["highest", "bfloat16_3x"])
def test_operands_of_precise_products_are_not_rounded(precision):
    def step(x, y):
        hidden = jnp.matmul(x, y, precision=precision)
        return jnp.matmul(jnp.matmul(hidden, y, precision=precision), hidden, precision=precision)

    assert {share for _, share in stored(TPU, step, square(), square())} == {1.0}


def test_a_tpu_stores_the_sum_of_a_residual_connection_once():
    def step(x, w):
        for _ in range(3):
            x = x + jnp.tanh(x) @ w
        return jnp.sum(x**2)

    def gradient(x, w):
        return jax.grad(step)(x, w)

    # Two sums are read by the next layer, forward and backward. The third is part of the loss.
    assert len([name for name, share in stored(TPU, gradient, square(), square()) if (name, share) == ("add", 1.0)]) <= 3


def test_new_state_and_removed_operations_take_no_memory():
    def step(w, x):
        unused = jnp.exp(x) @ x
        del unused
        return w - 0.1 * jnp.sin(x), jnp.sum(x)

    for compiler in (CPU, TPU):
        assert stored(compiler, step, square(), square()) == []


def test_the_largest_stored_value_of_a_cross_entropy_is_stored_once_on_tpu():
    def step(w, x, labels):
        def loss(w):
            logits = jax.nn.log_softmax(x @ w)
            return -jnp.take_along_axis(logits, labels[:, None], axis=1).mean()

        return w - jax.grad(loss)(w)

    rows = jax.ShapeDtypeStruct((512,), jnp.int32)
    whole = [share for _, share in stored(TPU, step, square(), square(), rows) if share == 1.0]
    assert len(whole) <= 2  # the logits, and the gradient of the weights


def test_an_outer_product_is_computed_into_the_sum_that_reads_it():
    def step(total, x, y):
        return total + jnp.einsum("bi,bj->bij", x, y)

    vector = jax.ShapeDtypeStruct((4, 512), jnp.float32)
    total = jax.ShapeDtypeStruct((4, 512, 512), jnp.float32)
    for compiler in (CPU, TPU):
        assert {name for name, _ in stored(compiler, step, total, vector, vector)} <= {"add"}


def test_the_carry_of_a_loop_overwrites_the_value_that_it_starts_with():
    def step(x, w):
        first = x @ w
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ w), first) @ w

    for compiler in (CPU, TPU):
        traced = trace(step, (square(), square()))
        loop = traced.program.loops[0]
        found = fuse(traced.program, traced.state, compiler).buffers
        assert all(each.end <= loop.start for each in found if each.start < loop.start)
        assert all(each.start >= loop.start for each in found if each.end > loop.start)


def test_the_result_of_a_conditional_takes_no_memory_before_its_branch_makes_it():
    def step(flag, x, w):
        return jax.lax.cond(flag, lambda: jnp.tanh(x @ w) @ w, lambda: (x @ w) @ (w @ w)) @ w

    traced = trace(step, (jax.ShapeDtypeStruct((), jnp.bool_), square(), square()))
    program = traced.program
    (each,) = program.conditionals
    results = {result for _, result, _ in each.results}
    buffers = [buffer for buffer in fuse(program, traced.state, CPU).buffers if buffer.value in results]
    assert buffers
    assert all(buffer.start >= each.end for buffer in buffers)


def test_the_zeros_that_a_scatter_fills_exist_from_the_start_where_operations_run_as_soon_as_they_can():
    def step(table, rows, x):
        y = x @ x
        return jnp.zeros_like(table).at[rows].add(y @ x) @ y

    traced = trace(step, (square(), jax.ShapeDtypeStruct((512,), jnp.int32), square()))
    (scatter,) = (op.results[0] for op in traced.program.ops if op.primitive.startswith("scatter"))
    starts = {
        compiler.name: next(each.start for each in fuse(traced.program, (), compiler).buffers if each.value == scatter)
        for compiler in (CPU, GPU)
    }
    assert starts["cpu"] == 0 < starts["gpu"]
