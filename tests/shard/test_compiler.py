"""The compiler of the right chip decides what fits."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from tests.extras import require
from tests.shard.limits import COMPILED_HERE, compile_to, count_compilations, plan_of, unchecked_plan
from tests.shard.steps import mlp, mlp_step, rows

import penstock as ps
from penstock.errors import CompileError, PlanError
from penstock.shard import compiler


def forward(w, x):
    """Compute what is sent nowhere, so that no other plan is compiled beside the one that was found."""
    return jnp.tanh(x @ w)


FORWARD = (jax.ShapeDtypeStruct((16, 32), "float32"), jax.ShapeDtypeStruct((16, 16), "float32"))


@pytest.mark.parametrize("check", [1, 0.5, ["v5e:2x4"]])
def test_a_check_of_another_type_is_refused(check):
    with pytest.raises(TypeError, match=r"check=.* True, False, None, .*'v5e:2x4'"):
        plan_of(mlp_step, mlp(), rows(), check=check)


def missing(topology):
    return f"the {topology.platform.upper()} compiler is missing: pip install it"


@pytest.mark.parametrize(("hardware", "compiler_name"), [("tpu-v5e", "TPU"), ("h100", "GPU")])
def test_a_plan_for_accelerators_is_not_judged_by_the_cpu_where_their_compiler_is_missing(monkeypatch, hardware, compiler_name):
    monkeypatch.setattr(compiler, "describe_missing_compiler", missing)
    compiled = count_compilations(monkeypatch)
    _, said = unchecked_plan(hardware=hardware, memory="60KiB")
    assert f"the {compiler_name} compiler is missing: pip install it" in said
    assert "may not fit, or a faster one may" in said
    assert not compiled


@pytest.mark.parametrize(("hardware", "compiler_name"), [("tpu-v5e", "TPU"), ("h100", "GPU")])
def test_with_check_the_cpu_judges_a_plan_for_accelerators_and_says_by_how_much_it_differs(monkeypatch, hardware, compiler_name):
    monkeypatch.setattr(compiler, "describe_missing_compiler", missing)
    plan = plan_of(forward, *FORWARD, hardware=hardware, check=True)
    assert plan.checked.compiled_for == COMPILED_HERE
    assert f"times the memory of the {compiler_name} compiler" in " ".join(str(plan).split())
    compile_to(monkeypatch, lambda plan: 2**40)
    with pytest.raises(PlanError, match=r"the CPU compiler needs up to .* times the memory for the same plan"):
        plan_of(mlp_step, mlp(64, 128), rows(64, 64), hardware=hardware, check=True, memory="20KiB")


@pytest.mark.parametrize(("count", "platform"), [(8, "tpu"), (9, "cpu")])
def test_memory_is_predicted_for_the_compiler_that_judges_and_only_that_of_cpus_is_said_to_need_more(
    monkeypatch, count, platform
):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")  # eight devices of this process
    monkeypatch.setattr(compiler, "describe_missing_compiler", missing)
    chosen = compiler.choose_compiler(True, "h100", count, None, None)
    assert chosen.platform == platform
    assert ("the CPU compiler needs up to" in chosen.remark) == (platform == "cpu")
    assert chosen.remark.startswith("the GPU compiler is missing")


def test_a_number_of_devices_that_no_topology_has_is_not_compiled_for_tpus():
    with pytest.warns(UserWarning, match="no topology of tpu-v5e has 3 devices"):
        plan_of(mlp_step, mlp(63, 126), rows(63, 63), mesh={"data": 3}, hardware="tpu-v5e", memory="90KiB")


@pytest.mark.parametrize(
    ("check", "options", "said"),
    [
        ("v5e:3x3", {}, ["there is no topology 'v5e:3x3'", "v5e:2x4"]),
        ("v99:2x4", {}, ["the chip 'v99' is not known", "v5e:2x4", "v6e:8x8"]),
        ("v5e:4x4", {}, ["v5e:4x4 has 16 devices", "data 8 needs 8", "topologies of 8: v5e:2x4"]),
        ("v5e:4x4", {"mesh": None, "devices": 8}, ["v5e:4x4 has 16 devices", "topologies of 8: v5e:2x4"]),
        ("v4:2x2x2", {}, ["compiles for tpu-v4", "hardware tpu-v5e", 'give check="v5e:2x4", or hardware="tpu-v4"']),
        ("v5e:2x4", {"hardware": "h100"}, ["hardware h100", 'check="h100:8"']),
        ("v3:2x2", {}, ["compiles for v3", 'check="v5e:2x4"', "hardware=penstock.shard.Hardware(...)"]),
        ("v3:2x2", {"hardware": None}, ["hardware=penstock.shard.Hardware(...)", "no datasheet of v3", "v5e:2x4"]),
        ("tpu7x:2x2x1", {"hardware": None}, ["hardware=penstock.shard.Hardware(...)", "no datasheet of tpu7x"]),
        ("v5e:32x32", {"mesh": None, "hardware": None}, ["v5e has at most 256 chips", "v5e:16x16"]),
        ("v100:8", {"hardware": None}, ["the chip 'v100' is not known", "h100:8", "l4:8x8"]),
        ("6xv5e:2x2", {"mesh": {"a": 4, "b": 6}}, ["mesh a 4 × b 6 does not divide into 6 slices of 4 devices"]),
        ("h100:32", {"hardware": None}, ["a host has 1 to 8 devices", "h100:4x8"]),
        ("h100:2x8", {"hardware": "h100"}, ["h100:2x8 has 16 devices", "data 8 needs 8", "topologies of 8: h100:8"]),
    ],
)
def test_a_topology_on_which_the_plan_cannot_run_is_refused_with_one_that_works(check, options, said):
    with pytest.raises(ValueError, match=r"topolog|compiles for") as refused:
        plan_of(mlp_step, mlp(), rows(), **{"hardware": "tpu-v5e", "check": check, **options})
    assert "\n" not in str(refused.value)
    assert [each for each in said if each not in str(refused.value)] == []
    with pytest.raises(ValueError, match="topology"):
        plan_of(mlp_step, mlp(), rows()).verify("v5e:4x4")


def test_a_topology_without_its_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(compiler, "describe_missing_compiler", missing)
    with pytest.raises(CompileError, match=r'check="v5e:2x4": the TPU compiler is missing: pip install it'):
        plan_of(mlp_step, mlp(), rows(), hardware="tpu-v5e", check="v5e:2x4")


def test_a_topology_is_text():
    with pytest.raises(TypeError, match="topology=8: a topology is text, as 'v5e:2x4'"):
        plan_of(mlp_step, mlp(), rows()).verify(8)


def test_a_topology_gives_hardware_and_devices_and_its_compiler_decides():
    require("libtpu")
    plan = ps.plan(mlp_step, mlp(), rows(), check="v5e:2x4")
    assert (plan.hardware, plan.device_count) == ("tpu-v5e", 8)
    assert plan.checked.compiled_for == "the TPU compiler for v5e:2x4"
    assert "compiled by the TPU compiler for v5e:2x4 in" in str(plan)


@pytest.mark.parametrize("check", [None, True])
def test_a_plan_for_tpus_is_judged_by_the_tpu_compiler(check):
    require("libtpu")
    predicted = plan_of(mlp_step, mlp(512, 2048), rows(1024, 512), hardware="tpu-v5e", check=False).cost.memory.total
    plan = plan_of(mlp_step, mlp(512, 2048), rows(1024, 512), hardware="tpu-v5e", check=check, memory=int(1.5 * predicted))
    assert plan.checked.compiled_for == "the TPU compiler for v5e:2x4"


def test_a_program_larger_than_the_chip_is_refused_with_its_size():
    require("libtpu")
    step, args = lambda x: jnp.sort(x, axis=0)[::-1], (jax.ShapeDtypeStruct((2**20, 2**13), "float32"),)
    with pytest.raises(PlanError, match="the TPU compiler for v5e:2x4 compiled"):
        plan_of(step, *args, hardware="tpu-v5e", memory="1TiB", check=True, constraints={"x": jax.sharding.PartitionSpec()})


def test_a_tpu_compiler_in_use_by_another_process_leaves_the_plan_unchecked(monkeypatch, tmp_path):
    require("libtpu")
    lock = (
        "import contextlib, fcntl, sys; f = open('/tmp/libtpu_lockfile', 'w')\n"
        "with contextlib.suppress(OSError):  # then this process has it, which also loads libtpu\n"
        "    fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "print(1, flush=True); sys.stdin.read()"
    )
    monkeypatch.setattr(compiler, "_WITHOUT_TPU", {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"})
    monkeypatch.delenv("ALLOW_MULTIPLE_LIBTPU_LOAD", raising=False)
    command = [sys.executable, "-c", lock]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        try:
            _, said = unchecked_plan(hardware="tpu-v5e", check="v5e:2x4", memory="60KiB")
        finally:
            other.kill()
    assert "in use by another process" in said
    assert "plan again" in said
