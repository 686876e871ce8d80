"""HBM traffic, counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from penstock.shard.graph.fusion import fuse, hbm_traffic
from penstock.shard.mesh.compiler_models import CPU, GPU, TPU
from penstock.shard.trace.step import trace

MB = 1 << 20


def square(dtype=jnp.float32):
    """Return a matrix of 1 MiB in float32."""
    return jax.ShapeDtypeStruct((512, 512), dtype)


def moved(step, *args, compiler=CPU):
    program = trace(step, args).program
    return zip(program.ops, hbm_traffic(program, fuse(program, (), compiler)), strict=True)


def traffic(step, *args, compiler=CPU):
    return {op.primitive: each.bytes for op, each in moved(step, *args, compiler=compiler)}


def test_a_product_reads_its_operands_and_writes_its_result():
    assert traffic(lambda x: x @ x, square())["dot_general"] == 2 * MB  # one operand, read as both
    assert traffic(lambda x, y: x @ y, square(), square())["dot_general"] == 3 * MB


def test_operands_fused_into_a_sum_are_read_once():
    op_bytes = traffic(lambda x, y: jnp.sum(x * y + 1, axis=0), square(), square())
    assert op_bytes == {"mul": 0, "add": 0, "reduce_sum": 2 * MB + 512 * 4}


def test_aliases_of_the_same_memory_have_no_traffic():
    op_bytes = traffic(lambda x: x.T.reshape(-1)[None].sum(), square())
    assert {op_bytes.get(name, 0) for name in ("transpose", "reshape", "broadcast_in_dim")} == {0}
    assert op_bytes["reduce_sum"] == MB + 4


def test_a_lookup_reads_only_the_rows_that_it_takes():
    table, rows = jax.ShapeDtypeStruct((1_000_000, 64), jnp.float32), jax.ShapeDtypeStruct((128,), jnp.int32)
    assert traffic(lambda table, rows: table[rows], table, rows)["gather"] == 2 * 128 * 64 * 4


@pytest.mark.parametrize(("compiler", "read"), [(TPU, MB), (CPU, 2 * MB), (GPU, 2 * MB)], ids=["tpu", "cpu", "gpu"])
def test_an_elementwise_operation_reads_the_product_before_it_without_hbm_on_tpu(compiler, read):
    found = traffic(lambda x, y, z: x @ y + z, square(), square(), square(), compiler=compiler)
    assert found == {"dot_general": 3 * MB, "add": read + MB}


def test_an_epilogue_goes_on_through_elementwise_operations():
    def step(x, y, z):
        hidden = x @ y + z
        return hidden, jnp.tanh(hidden) * z

    found = traffic(step, square(), square(), square(), compiler=TPU)
    assert found["add"] == 2 * MB  # the other operand, and the result
    assert found["mul"] == MB  # the other operand is read once for both


def test_a_reduction_is_in_the_epilogue_and_operations_that_need_its_result_are_not():
    def step(x, y):
        hidden = x @ y
        largest = jnp.max(hidden, axis=1, keepdims=True)
        return hidden - largest

    found = traffic(step, square(), square(), compiler=TPU)
    assert found["reduce_max"] == 512 * 4
    assert found["sub"] == 2 * MB + 512 * 4
    assert traffic(step, square(), square())["reduce_max"] == MB + 512 * 4


def test_an_operation_is_in_the_epilogue_of_the_last_of_its_products():
    found = traffic(lambda x, y: (x @ y) + (y @ x), square(), square(), compiler=TPU)
    assert found["add"] == 2 * MB
    assert traffic(lambda x, y: (x @ y) + (y @ x), square(), square())["add"] == 3 * MB


def test_an_operation_that_cannot_be_fused_ends_the_epilogue():
    def step(x, y):
        sums = jnp.cumsum(x @ y, axis=0)
        return sums, sums + 1

    found = traffic(step, square(), square(), compiler=TPU)
    assert found["cumsum"] == found["add"] == 2 * MB


def test_a_product_reads_the_product_before_it_from_hbm():
    found = moved(lambda x, y: (x @ y) @ y, square(), square(), compiler=TPU)
    assert [each.bytes for _, each in found] == [3 * MB, 3 * MB]


def test_the_update_of_a_weight_reads_its_gradient_from_hbm():
    def step(v, w, x):
        hidden = jnp.tanh(x @ w)
        return v - 0.1 * jax.grad(lambda v: ((hidden @ v) ** 2).sum())(v)

    assert traffic(step, *[square()] * 3, compiler=TPU)["sub"] == 3 * MB  # the weight, the gradient, and the new weight


def test_a_result_of_the_step_is_made_in_the_epilogue_of_the_product_that_reads_a_weight():
    found = traffic(lambda v, w, x: jnp.tanh(jnp.tanh(x @ w) @ v) + x, *[square()] * 3, compiler=TPU)
    assert found["add"] == 2 * MB


def test_the_updates_of_a_weight_and_its_moments_are_one_operation_that_reads_each_array_once():
    def step(w, first, second, gradient):
        first, second = 0.9 * first + gradient, 0.9 * second + gradient**2
        return w - first / (jnp.sqrt(second) + 1e-8), first, second

    found = [each for _, each in moved(step, *[square()] * 4) if each.bytes]
    assert sum(each.bytes for each in found) == 7 * MB  # four are read and three are written
    assert [each.runs for each in found].count(1) == 1


def test_an_operation_in_an_epilogue_does_not_run_by_itself():
    found = {op.primitive: each.runs for op, each in moved(lambda x, y, z: x @ y + z, *[square()] * 3, compiler=TPU)}
    assert found == {"dot_general": 1, "add": 0}


def test_the_gradient_of_a_lookup_writes_its_whole_table():
    table, rows = jax.ShapeDtypeStruct((4096, 64), jnp.float32), jax.ShapeDtypeStruct((128,), jnp.int32)
    found = traffic(jax.grad(lambda table, rows: (table[rows] ** 2).sum()), table, rows)
    assert found["scatter-add"] == 2 * 128 * 64 * 4 + MB


@pytest.mark.parametrize(
    ("look_up", "one_by_one"),
    [
        (lambda table, rows: table[rows], False),
        (lambda table, rows: jnp.take_along_axis(table, rows[:, None], 0), False),
        (lambda table, rows: jax.vmap(lambda row: table[row])(rows), True),
        (lambda table, rows: jax.vmap(lambda row: lax.dynamic_slice(table, (row, 0), (2, 64)))(rows), True),
    ],
    ids=["array", "along an axis", "scalar under vmap", "slices under vmap"],
)
def test_a_tpu_applies_the_updates_of_windows_one_by_one(look_up, one_by_one):
    table, rows = jax.ShapeDtypeStruct((4096, 64), jnp.float32), jax.ShapeDtypeStruct((128,), jnp.int32)
    gradient = jax.grad(lambda table, rows: (look_up(table, rows) ** 2).sum())
    for compiler in (TPU, GPU):
        found = {op.primitive: each.runs for op, each in moved(gradient, table, rows, compiler=compiler)}
        assert found["scatter-add"] == (4 * 128 if one_by_one and compiler is TPU else 1)
