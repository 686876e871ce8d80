"""HBM traffic, counted by hand."""

import jax
import jax.numpy as jnp

from penstock.shard.graph.fusion import fuse
from penstock.shard.graph.hbm_traffic import hbm_traffic
from penstock.shard.mesh.compiler_models import CPU
from penstock.shard.trace.step import trace

MB = 1 << 20


def square(dtype=jnp.float32):
    """Return a matrix of 1 MiB in float32."""
    return jax.ShapeDtypeStruct((512, 512), dtype)


def traffic(step, *args):
    program = trace(step, args).program
    sizes = hbm_traffic(program, fuse(program, (), CPU))
    return {op.primitive: size for op, size in zip(program.ops, sizes, strict=True)}


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
