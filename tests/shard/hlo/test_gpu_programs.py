"""Programs of the GPU compiler, for GPUs that need not be here, are compiled and read."""

import jax
import jax.numpy as jnp
import pytest
from tests.shard.hlo.train_step import MESH, directly, elsewhere, train
from tests.shard.steps import array, mlp, mlp_step, rows

import penstock as ps
from penstock.errors import PlanError
from penstock.shard.compiler import export_program, measure_exported
from penstock.shard.hlo.topologies import GPUS, describe_missing_compiler, find_topology

# The GPU compiler is not a dependency of the tests: with it, every process that starts JAX looks for CUDA.
if missing := describe_missing_compiler(find_topology("h100:8")):
    pytest.skip(f"needs the GPU compiler: {missing}", allow_module_level=True)


@pytest.fixture(scope="module")
def program():
    jitted, *arguments = train(elsewhere())
    return export_program(jitted, *arguments, mesh=MESH, platform="gpu")


def test_gpus_that_are_not_here(program):
    on_one_host, on_two = (measure_exported([program], topology=name)[0] for name in ("h100:8", "h100:2x4"))
    cpu = directly()
    for found in (on_one_host, on_two):
        assert found.arguments == cpu.arguments
        assert found.aliased == cpu.aliased
        assert found.flops == pytest.approx(cpu.flops, rel=0.05)
        assert found.bytes_on_wire == pytest.approx(cpu.bytes_on_wire, rel=0.01)
        assert not found.unknown


@pytest.mark.parametrize("chip", GPUS)
def test_each_gpu_has_a_compiler(program, chip):
    (found,) = measure_exported([program], topology=f"{chip}:8")
    assert found.flops == pytest.approx(directly().flops, rel=0.05)


def test_a_plan_is_judged_by_the_gpu_compiler_and_its_network_is_priced():
    plan = ps.plan(mlp_step, mlp(512, 2048), rows(1024, 512), check="h100:2x8")
    assert (plan.hardware, plan.device_count) == ("h100", 16)
    assert plan.checked.compiled_for == "the GPU compiler for h100:2x8"
    assert plan.cost.memory.arguments == plan.checked.arguments
    assert plan.cost.flops == pytest.approx(plan.checked.flops, rel=0.05)
    near = ps.plan(mlp_step, mlp(512, 2048), rows(1024, 512), check="h100:8", mesh={"data": 2, "model": 4})
    assert near.verify("h100:2x4").measured.bytes_on_wire == near.checked.bytes_on_wire


def test_a_limit_that_no_plan_keeps_is_refused_by_the_gpu_compiler():
    with pytest.raises(PlanError, match=r"no layout|nothing fits"):
        ps.plan(lambda x: jnp.sort(x, axis=0)[::-1], array(2**12, 2**10), check="h100:8", memory="2MiB")


def test_library_calls_and_random_numbers_compile():
    def step(x, key):
        noise = x + jax.random.normal(key, x.shape)
        return jnp.linalg.cholesky(noise @ noise.mT), jnp.abs(jnp.fft.rfft(noise))

    key = jax.eval_shape(lambda: jax.random.key(0))
    plan = ps.plan(step, array(64, 32, 32), key, check="a100:4")
    assert plan.checked.compiled_for == "the GPU compiler for a100:4"
