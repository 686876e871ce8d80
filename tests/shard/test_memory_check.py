"""Plans near the memory limit are compiled, and the compiler's figure decides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from tests.shard.steps import mlp, mlp_step, rows

import penstock as ps
from penstock.shard import PlanError
from penstock.shard.hlo.analysis import CompileError


def scaled(x):
    """Run a kernel that only TPUs and GPUs can compile."""

    def kernel(given, made):
        made[...] = given[...] * 2.0

    return pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def step_with_a_kernel(w, x):
    return w - 0.1 * (x.T @ scaled(x @ w)), jnp.float32(0)


ARGS = (jax.ShapeDtypeStruct((64, 64), np.float32), jax.ShapeDtypeStruct((512, 64), np.float32))


def plan_of(step, *args, **options):
    return ps.plan(step, *args, **{"mesh": {"data": 8}, "hardware": "tpu-v5e", **options})


def test_a_step_that_does_not_compile_here_is_planned_with_a_warning():
    needed = plan_of(step_with_a_kernel, *ARGS).cost.memory.total
    with pytest.warns(UserWarning, match=r"could not be compiled here to check that it fits: .*CPU"):
        plan = plan_of(step_with_a_kernel, *ARGS, memory=int(1.1 * needed))
    assert plan.checked is None


def test_a_step_that_does_not_compile_is_an_error_with_check():
    plan = plan_of(step_with_a_kernel, *ARGS)
    with pytest.raises(CompileError, match="CPU"):
        plan.verify()
    with pytest.raises(CompileError, match="CPU"):
        plan_of(step_with_a_kernel, *ARGS, check=True)


def test_a_topology_is_text():
    with pytest.raises(TypeError, match="topology=8: a topology is text, as 'v5e:2x4'"):
        plan_of(mlp_step, mlp(), rows()).verify(8)


def test_a_plan_predicted_above_the_limit_is_compiled_before_it_is_refused():
    def step(w, x):
        y, _ = jax.lax.scan(lambda carry, n: (carry + jnp.sin(carry * n), None), x @ w, jnp.arange(4.0))
        return w - 0.1 * (x.T @ y), y.sum()

    args = (jax.ShapeDtypeStruct((64, 64), np.float32), jax.ShapeDtypeStruct((4096, 64), np.float32))
    smallest = plan_of(step, *args, check=False)
    while True:
        limit = int(0.95 * smallest.cost.memory.total)
        try:
            smallest = plan_of(step, *args, memory=limit, check=False)
        except PlanError:
            break
    needed = smallest.verify().measured.memory
    assert needed <= limit, "the compiler needs no less than foreseen: take a step of which that is so"
    with pytest.raises(PlanError, match="by prediction"):
        plan_of(step, *args, memory=limit, check=False)
    plan = plan_of(step, *args, memory=limit)
    assert plan.checked is not None
    assert plan.checked.memory <= limit
    with pytest.raises(PlanError, match="by prediction"):
        plan_of(step, *args, memory=needed // 2)


def test_small_arrays_are_sharded_for_memory_although_latency_dominates():
    """Check that the price on bytes rises until an array is sharded, where all time is latency."""

    def step(w, x):
        return w - 0.1 * (x.T @ (x @ w)), jnp.float32(0)

    args = (jax.ShapeDtypeStruct((64, 32), np.float32), jax.ShapeDtypeStruct((16, 64), np.float32))
    smallest = plan_of(step, *args, constraints={"w": jax.sharding.PartitionSpec(None, "data")}, check=False).cost.memory.total
    assert plan_of(step, *args, memory=int(1.2 * smallest), check=False).cost.memory.total <= 1.2 * smallest
