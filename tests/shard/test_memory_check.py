"""The compiler of the right chip decides what fits, and plans that it did not see say so."""

import importlib.util
import os
import signal
import subprocess
import threading
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from tests.shard.steps import array, mlp, mlp_step, rows, sgd

import penstock as ps
from penstock.shard import CompileError, PlanError, compile_plan, compiler, find_hardware
from penstock.shard.errors import CompilerFailedError, CompilerMemoryError, compile_error
from penstock.shard.hlo import compile_exported
from penstock.shard.hlo.analysis import Measured

AT_HAND = replace(find_hardware("tpu-v5e"), name="a chip whose compiler is that of this machine", platform="cpu")
COMPILED_HERE = "the CPU compiler for 8 of this process's devices"


def scaled(x):
    """Run a kernel that only TPUs and GPUs can compile."""

    def kernel(given, made):
        made[...] = given[...] * 2.0

    return pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def step_with_a_kernel(w, x):
    return w - 0.1 * (x.T @ scaled(x @ w)), jnp.float32(0)


ARGS = (jax.ShapeDtypeStruct((64, 64), np.float32), jax.ShapeDtypeStruct((512, 64), np.float32))


def plan_of(step, *args, **options):
    return ps.plan(step, *args, **{"mesh": {"data": 8}, "hardware": AT_HAND, **options})


def unchecked_plan(*args, **options):
    """Return a plan of an MLP that was not compiled, although it is near its limit or above, and its warning."""
    with pytest.warns(UserWarning, match="the plan is unchecked") as said:
        plan = plan_of(mlp_step, mlp(64, 128), rows(64, 64), *args, **options)
    assert plan.checked is None
    assert plan.unchecked
    assert "unchecked" in str(plan)
    (warning,) = said
    assert warning.filename == __file__
    message = str(warning.message)
    assert "\n" not in message
    return plan, message


LEAST = 4 * (2 * 64 * 128 + 128 + 2 * 64 * 64) // 8
"""Bytes of the arguments of that MLP on each of 8 devices, if all are sharded."""


# The rule of what is compiled.


def test_a_plan_far_below_its_limit_is_compiled_on_request_only():
    assert plan_of(mlp_step, mlp(), rows()).checked is None
    plan = plan_of(mlp_step, mlp(), rows(), check=True)
    assert plan.checked.compiled_for == COMPILED_HERE
    assert plan.checked.seconds_to_compile > 0
    assert not plan.unchecked


@pytest.mark.parametrize("check", [None, True])
def test_a_plan_predicted_far_above_its_limit_is_compiled_before_it_is_refused(check, monkeypatch):
    compiled = count_compilations(monkeypatch)
    memory = int(1.1 * LEAST)
    with pytest.raises(PlanError, match=f"no layout that was found fits.* {COMPILED_HERE} compiled") as refused:
        plan_of(mlp_step, mlp(64, 128), rows(64, 64), memory=memory, check=check)
    assert compiled
    plan, _ = unchecked_plan(memory=memory, check=False)
    assert plan.cost.memory.total > 1.5 * memory, "it is predicted near its limit: take a lower one"
    for said in ("too much", "of 'params/in' float32[64, 128]", "of an activation float32["):
        assert said in str(refused.value)


def test_a_large_step_is_compiled_before_it_is_refused(monkeypatch):
    monkeypatch.setattr("penstock.shard.memory_check._LARGEST", 0)
    compiled = count_compilations(monkeypatch)
    predicted = plan_of(mlp_step, mlp(), rows()).cost.memory.total
    assert plan_of(mlp_step, mlp(), rows(), memory=int(1.2 * predicted)).unchecked
    assert not compiled
    with pytest.raises(PlanError, match="compiled"):
        plan_of(mlp_step, mlp(64, 128), rows(64, 64), memory=int(1.1 * LEAST))
    assert compiled


def test_without_a_check_nothing_is_compiled_and_nothing_refused_by_prediction(monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    plan, said = unchecked_plan(memory=int(1.1 * LEAST), check=False)
    assert plan.cost.memory.total > plan.limit
    assert "more than its limit, and check=False compiles nothing" in said


@pytest.mark.parametrize("check", [None, True, False])
def test_arguments_that_alone_exceed_the_limit_are_refused_at_once(check, monkeypatch):
    compiled = count_compilations(monkeypatch)
    memory = LEAST - 1
    with pytest.raises(PlanError, match=r"no layout fits .*: the arguments alone take .* too much\. The largest .* 'params/in'"):
        plan_of(mlp_step, mlp(64, 128), rows(64, 64), memory=memory, check=check)
    assert not compiled


def test_layouts_that_the_user_gives_count_in_the_least_arguments():
    constraints = {"params/*": jax.sharding.PartitionSpec()}
    whole = 4 * (64 * 128 * 2 + 128)
    with pytest.raises(PlanError, match="the arguments alone take"):
        plan_of(mlp_step, mlp(64, 128), rows(64, 64), memory=whole, constraints=constraints, check=False)


@pytest.mark.parametrize("check", [8, 1, 0.5, ["v5e:2x4"]])
def test_a_check_of_another_type_is_refused(check):
    with pytest.raises(TypeError, match=r"check=.* give True, False, None, or a TPU topology as text, such as 'v5e:2x4'"):
        plan_of(mlp_step, mlp(), rows(), check=check)


# Corrections of the prediction. The figures are made up, so that the compiler needs a known fraction of the prediction.


def count_compilations(monkeypatch):
    """Return a list to which each compilation adds its figures."""
    compiled = []

    def compile_and_count(*args):
        compiled.append(compile_plan.compile_plan(*args))
        return compiled[-1]

    monkeypatch.setattr(compiler, "compile_plan", compile_and_count)
    return compiled


def compile_to(monkeypatch, bytes_of):
    """Replace the compiler by one whose programs need `bytes_of(plan)`; return the plans that it compiles."""
    compiled = []

    def compile_plan(plan, *_):
        compiled.append(plan)
        arguments = plan.cost.memory.arguments
        return Measured(arguments, 0, int(bytes_of(plan)) - arguments, 0, 1.0, (), 1.0, (), "a made-up compiler")

    monkeypatch.setattr(compiler, "compile_plan", compile_plan)
    return compiled


def deep_step(params, batch):
    """Train a chain of layers: gathering weights for each saves memory and takes time."""

    def loss(params):
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return sgd(params, gradients), value


DEEP = ([array(512, 512) for _ in range(4)], array(2048, 512))
SMALL = ([array(256, 256) for _ in range(2)], array(256, 256))


@pytest.mark.parametrize("fraction", [0.4, 0.7])
def test_a_plan_that_needs_less_than_predicted_is_replaced_by_a_faster_one(fraction, monkeypatch):
    fast = plan_of(deep_step, *SMALL, check=False)
    limit = int(1.02 * fraction * fast.cost.memory.total)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        slow = plan_of(deep_step, *SMALL, memory=limit, check=False)
    assert slow.cost.seconds > 1.05 * fast.cost.seconds, "the limit costs nothing: take a step for which it does"
    compiled = compile_to(monkeypatch, lambda plan: fraction * plan.cost.memory.total)
    plan = plan_of(deep_step, *SMALL, memory=limit)
    assert plan.cost.seconds <= 1.02 * fast.cost.seconds
    assert plan.checked.memory <= limit
    assert 2 <= len(compiled) <= 4
    assert len({id(each) for each in compiled}) == len(compiled)


def test_a_plan_that_needs_more_than_predicted_is_replaced_by_a_smaller_one(monkeypatch):
    fast = plan_of(deep_step, *DEEP, check=False)
    compiled = compile_to(monkeypatch, lambda plan: 1.5 * plan.cost.memory.total)
    limit = int(1.2 * fast.cost.memory.total)
    plan = plan_of(deep_step, *DEEP, memory=limit)
    assert plan.checked.memory <= limit
    assert plan.cost.memory.total < fast.cost.memory.total
    assert len(compiled) <= 4


def test_a_plan_is_compiled_once(monkeypatch):
    compiled = compile_to(monkeypatch, lambda plan: 2**40)
    with pytest.raises(PlanError, match="plans that"):
        plan_of(deep_step, *DEEP, memory=2 * 2**20)
    layouts = [(plan.inputs, plan.sharding_constraints) for plan in compiled]
    assert all(one != other for at, one in enumerate(layouts) for other in layouts[:at])


def test_a_baseline_that_fits_is_taken_before_a_refusal(monkeypatch):
    names = list(plan_of(deep_step, *DEEP, check=False).baselines)
    costs = plan_of(deep_step, *DEEP, check=False).baselines

    def needs(plan):
        return 2**20 if plan.cost == costs[names[0]] else 2**40

    limit = int(1.1 * costs[names[0]].memory.arguments)
    compiled = compile_to(monkeypatch, needs)
    plan = plan_of(deep_step, *DEEP, memory=limit)
    assert plan.cost == costs[names[0]]
    assert plan.checked.memory == 2**20
    assert len(compiled) <= 6


def test_a_baseline_whose_arguments_exceed_the_limit_is_not_compiled(monkeypatch):
    compiled = compile_to(monkeypatch, lambda plan: 2**40)
    limit = 2 * 2**20  # the replicated parameters take 4 MiB
    with pytest.raises(PlanError):
        plan_of(deep_step, *DEEP, memory=limit)
    assert compiled
    assert all(plan.cost.memory.arguments <= limit for plan in compiled)


def test_a_program_that_exceeds_the_memory_of_the_chip_does_not_fit(monkeypatch):
    def out_of_memory(plan, *_):
        raise CompilerMemoryError("out of memory", 3 * 2**30)

    monkeypatch.setattr(compiler, "compile_plan", out_of_memory)
    with pytest.raises(PlanError, match=r"the smallest needs 3 GiB"):
        plan_of(mlp_step, mlp(), rows(), check=True)


@pytest.mark.parametrize(
    ("message", "kind", "needed"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required (34.50G) exceeds available (15.75G).",
            "m",
            34.5,
        ),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 29.70G of 15.75G hbm.", "m", 29.7),
        (
            'ABORTED: Internal error when accessing libtpu multi-process lockfile. Run "$ sudo rm /tmp/libtpu_lockfile".',
            "f",
            None,
        ),
        ("ABORTED: The TPU is already in use by process with pid 42.", "f", None),
        ("INTERNAL: no such operation", "c", None),
    ],
)
def test_messages_of_compilers_are_understood(message, kind, needed):
    error = compile_error(message)
    assert type(error) is {"m": CompilerMemoryError, "f": CompilerFailedError, "c": CompileError}[kind]
    assert needed is None or error.needed == int(needed * 2**30)


# Compilers that fail.


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


def test_a_compiler_that_is_killed_leaves_the_plan_unchecked(monkeypatch):
    """Kill the process that compiles for 16 virtual devices, as the system does when memory runs out."""
    start = subprocess.Popen

    def start_and_kill(*args, **options):
        process = start(*args, **options)
        threading.Timer(0.5, os.killpg, (process.pid, signal.SIGKILL)).start()
        return process

    monkeypatch.setattr(compile_exported.subprocess, "Popen", start_and_kill)
    _, said = unchecked_plan(mesh={"data": 16}, check=True, memory="40KiB")
    assert "was killed (signal 9)" in said
    assert "plan again" in said


def test_a_compiler_that_hangs_leaves_the_plan_unchecked(monkeypatch):
    monkeypatch.setattr(compile_plan, "_PATIENCE", 0.5)
    _, said = unchecked_plan(mesh={"data": 16}, check=None, memory="40KiB")
    assert "gave no answer in" in said


def test_a_plan_that_fits_is_returned_if_the_compiler_fails_later(monkeypatch):
    fast = plan_of(deep_step, *DEEP, check=False)
    compiled = []

    def dies_after_one(plan, *_):
        if compiled:
            raise CompilerFailedError("it is gone")
        compiled.append(plan)
        return Measured(1, 0, plan.cost.memory.total // 2, 0, 1.0, (), 1.0)

    monkeypatch.setattr(compiler, "compile_plan", dies_after_one)
    plan = plan_of(deep_step, *DEEP, memory=int(0.6 * fast.cost.memory.total))
    assert plan.cost == compiled[0].cost
    assert plan.checked is not None


# The compiler of the chip.


def test_a_plan_for_tpus_is_not_judged_by_the_cpu_where_the_tpu_compiler_is_missing(monkeypatch):
    monkeypatch.setattr(compiler, "tpu_compiler_is_installed", lambda: False)
    compiled = count_compilations(monkeypatch)
    _, said = unchecked_plan(hardware="tpu-v5e", memory="60KiB")
    assert 'the TPU compiler is not installed (pip install "penstock[tpu]")' in said
    assert "may not fit, or a faster one may" in said
    assert not compiled


def test_with_check_the_cpu_judges_a_plan_for_tpus_and_says_by_how_much_it_differs(monkeypatch):
    monkeypatch.setattr(compiler, "tpu_compiler_is_installed", lambda: False)
    plan = plan_of(mlp_step, mlp(), rows(), hardware="tpu-v5e", check=True)
    assert plan.checked.compiled_for == COMPILED_HERE
    assert "times the memory of the TPU compiler" in " ".join(str(plan).split())
    with pytest.raises(PlanError, match=r"the CPU compiler needs up to .* times the memory for the same plan"):
        plan_of(mlp_step, mlp(64, 128), rows(64, 64), hardware="tpu-v5e", check=True, memory="20KiB")


def test_a_plan_for_gpus_is_compiled_for_cpus_where_there_are_none():
    plan = plan_of(mlp_step, mlp(), rows(), hardware="h100", check=True)
    assert plan.checked.compiled_for == COMPILED_HERE
    assert "times the memory of the GPU compiler" in " ".join(str(plan).split())


def test_a_number_of_devices_that_no_topology_has_is_not_compiled_for_tpus():
    with pytest.warns(UserWarning, match="no topology of the TPU compiler has 3 devices"):
        plan_of(mlp_step, mlp(63, 126), rows(63, 63), mesh={"data": 3}, hardware="tpu-v5e", memory="90KiB")


@pytest.mark.parametrize(
    ("check", "options", "said"),
    [
        ("v5e:3x3", {}, ["there is no TPU topology 'v5e:3x3'", "v5e:2x4"]),
        ("v99:2x4", {}, ["the chip 'v99' is not known", "v5e:2x4", "v6e:8x8"]),
        ("v5e:4x4", {}, ["v5e:4x4 has 16 devices", "data 8 needs 8", "topologies of 8: v5e:2x4"]),
        ("v5e:4x4", {"mesh": None, "devices": 8}, ["v5e:4x4 has 16 devices", "topologies of 8: v5e:2x4"]),
        ("v4:2x2x2", {}, ["compiles for tpu-v4", "hardware tpu-v5e", 'give check="v5e:2x4", or hardware="tpu-v4"']),
        ("v5e:2x4", {"hardware": "h100"}, ["hardware h100", "check=True"]),
    ],
)
def test_a_topology_on_which_the_plan_cannot_run_is_refused_with_one_that_works(check, options, said):
    with pytest.raises(ValueError, match=r"topology|compiles for") as refused:
        plan_of(mlp_step, mlp(), rows(), **{"hardware": "tpu-v5e", "check": check, **options})
    assert "\n" not in str(refused.value)
    assert [each for each in said if each not in str(refused.value)] == []
    with pytest.raises(ValueError, match="topology"):
        plan_of(mlp_step, mlp(), rows()).verify("v5e:4x4")


def test_a_topology_without_its_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(compiler, "tpu_compiler_is_installed", lambda: False)
    with pytest.raises(CompileError, match=r'needs the TPU compiler, which is not installed: pip install "penstock\[tpu\]"'):
        plan_of(mlp_step, mlp(), rows(), hardware="tpu-v5e", check="v5e:2x4")


def test_a_topology_is_text():
    with pytest.raises(TypeError, match="topology=8: a topology is text, as 'v5e:2x4'"):
        plan_of(mlp_step, mlp(), rows()).verify(8)


# As in hlo/test_compile_exported.py.
if importlib.util.find_spec("libtpu"):

    def test_a_topology_gives_hardware_and_devices_and_its_compiler_decides():
        plan = ps.plan(mlp_step, mlp(), rows(), check="v5e:2x4")
        assert (plan.hardware, plan.device_count) == ("tpu-v5e", 8)
        assert plan.checked.compiled_for == "the TPU compiler for v5e:2x4"
        assert "compiled by the TPU compiler for v5e:2x4 in" in str(plan)

    @pytest.mark.parametrize("check", [None, True])
    def test_a_plan_for_tpus_is_judged_by_the_tpu_compiler(check):
        predicted = plan_of(mlp_step, mlp(512, 2048), rows(1024, 512), hardware="tpu-v5e", check=False).cost.memory.total
        plan = plan_of(mlp_step, mlp(512, 2048), rows(1024, 512), hardware="tpu-v5e", check=check, memory=int(1.5 * predicted))
        assert plan.checked.compiled_for == "the TPU compiler for v5e:2x4"

    def test_a_program_larger_than_the_chip_is_refused_with_its_size():
        step, args = lambda x: jnp.sort(x, axis=0)[::-1], (jax.ShapeDtypeStruct((2**20, 2**13), "float32"),)
        with pytest.raises(PlanError, match="the TPU compiler for v5e:2x4 compiled"):
            plan_of(step, *args, hardware="tpu-v5e", memory="1TiB", check=True, constraints={"x": jax.sharding.PartitionSpec()})

    def test_a_tpu_compiler_in_use_by_another_process_leaves_the_plan_unchecked(monkeypatch, tmp_path):
        lock = (
            "import fcntl, sys, time; f = open('/tmp/libtpu_lockfile', 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True)"
        )
        monkeypatch.setattr(compile_exported, "_WITHOUT_TPU", {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"})
        command = ["python", "-c", f"{lock}; sys.stdin.read()"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            other.stdout.readline()
            _, said = unchecked_plan(hardware="tpu-v5e", check="v5e:2x4", memory="60KiB")
            other.stdin.close()
        assert "in use by another process" in said
        assert "plan again" in said


def test_small_arrays_are_sharded_for_memory_although_latency_dominates():
    """Check that the price on bytes rises until an array is sharded, where all time is latency."""

    def step(w, x):
        return w - 0.1 * (x.T @ (x @ w)), jnp.float32(0)

    args = (jax.ShapeDtypeStruct((64, 32), np.float32), jax.ShapeDtypeStruct((16, 64), np.float32))
    smallest = plan_of(step, *args, constraints={"w": jax.sharding.PartitionSpec(None, "data")}, check=False).cost.memory.total
    assert plan_of(step, *args, memory=int(1.2 * smallest), check=False).cost.memory.total <= 1.2 * smallest
