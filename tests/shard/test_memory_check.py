"""Plans near their limit are compiled, and those that no compiler saw say so."""

import os
import signal
import subprocess
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from tests.shard.limits import (
    COMPILED_HERE,
    DEEP,
    LEAST,
    compile_by,
    compile_to,
    count_compilations,
    deep_step,
    plan_of,
    unchecked_plan,
)
from tests.shard.steps import array, mlp, mlp_step, rows

import penstock as ps
from penstock.errors import CompileError, CompilerFailedError, CompilerMemoryError, PlanError
from penstock.shard import compiler
from penstock.shard.hlo.analysis import Measured, compile_error

pytestmark = pytest.mark.usefixtures("refusals_name_no_options")


def scaled(x):
    """Run a kernel that only TPUs and GPUs can compile."""

    def kernel(given, made):
        made[...] = given[...] * 2.0

    return pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def step_with_a_kernel(w, x):
    return w - 0.1 * (x.T @ scaled(x @ w)), jnp.float32(0)


ARGS = (jax.ShapeDtypeStruct((64, 64), np.float32), jax.ShapeDtypeStruct((512, 64), np.float32))


# The rule of what is compiled.


def test_a_plan_far_below_its_limit_is_compiled_on_request_only():
    def forward(w, x):  # it sends nothing, so that no other plan is compiled
        return jnp.tanh(x @ w)

    assert plan_of(forward, array(16, 32), array(16, 16)).checked is None
    plan = plan_of(forward, array(16, 32), array(16, 16), check=True)
    assert plan.checked.compiled_for == COMPILED_HERE
    assert plan.checked.seconds_to_compile > 0
    assert not plan.unchecked


@pytest.mark.slow
@pytest.mark.parametrize("check", [None, True])
def test_a_plan_predicted_far_above_its_limit_is_compiled_before_it_is_refused(check, monkeypatch):
    compiled = count_compilations(monkeypatch)
    memory = int(1.1 * LEAST)
    with pytest.raises(PlanError, match=rf"no layout (that was found )?fits.* {COMPILED_HERE} compiled") as refused:
        plan_of(mlp_step, mlp(64, 128), rows(64, 64), memory=memory, check=check)
    assert compiled
    plan, _ = unchecked_plan(memory=memory, check=False)
    assert plan.cost.memory.total > 1.5 * memory, "it is predicted near its limit: take a lower one"
    for said in ("too much", "of 'params/in' float32[64, 128]", "of an activation float32[", "jax.checkpoint"):
        assert said in str(refused.value)


def test_a_large_step_is_compiled_before_it_is_refused(monkeypatch):
    monkeypatch.setattr("penstock.shard.memory._MOST_CONSTRAINTS", 0)
    compiled = compile_to(monkeypatch, lambda plan: 2**40)
    predicted = plan_of(mlp_step, mlp(), rows()).cost.memory.total
    assert plan_of(mlp_step, mlp(), rows(), memory=int(1.2 * predicted)).unchecked
    assert not compiled
    with pytest.raises(PlanError, match=r"no layout fits .* every layout needs at least .* \(proved\); of .* compiled"):
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


# Corrections of the prediction. The figures are made up, so that the compiler needs a known fraction of the prediction.


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
    costs = plan_of(deep_step, *DEEP, check=False).baselines
    smallest = costs["FSDP"]
    limit = int(0.9 * smallest.memory.total)
    compiled = compile_to(monkeypatch, lambda plan: limit if plan.cost == smallest else 1.2 * limit)
    plan = plan_of(deep_step, *DEEP, memory=limit)
    assert plan.cost == smallest
    assert plan.checked.memory == limit
    assert not any(each.left_to_compiler for each in compiled)


def test_after_a_slow_baseline_that_fits_smaller_plans_are_tried(monkeypatch):
    arguments = ([array(512, 512) for _ in range(4)], array(512, 512))
    mesh = {"data": 2, "model": 4}
    slow = plan_of(deep_step, *arguments, mesh=mesh, check=False).baselines["FSDP"]
    limit = slow.memory.total
    compiled = compile_to(monkeypatch, lambda plan: limit if plan.cost == slow or slow in costs() else 1.01 * limit)

    def costs():
        return [each.cost for each in compiled]

    plan = plan_of(deep_step, *arguments, mesh=mesh, memory=limit)
    assert slow in costs()
    assert plan.cost.seconds < 0.8 * slow.seconds


def test_plans_that_are_expected_far_above_the_limit_are_not_compiled_before_a_refusal(monkeypatch):
    costs = plan_of(deep_step, *DEEP, check=False).baselines
    limit = int(0.5 * min(cost.memory.total for cost in costs.values()))
    compiled = compile_to(monkeypatch, lambda plan: plan.cost.memory.total)
    with pytest.raises(PlanError, match=r"every layout needs at least .* \(proved\)"):
        plan_of(deep_step, *DEEP, memory=limit)
    assert len([plan for plan in compiled if not plan.left_to_compiler]) == 1


def test_a_baseline_whose_arguments_exceed_the_limit_is_not_compiled(monkeypatch):
    compiled = compile_to(monkeypatch, lambda plan: 2**40)
    limit = 2 * 2**20  # the replicated parameters take 4 MiB
    with pytest.raises(PlanError):
        plan_of(deep_step, *DEEP, memory=limit)
    assert compiled
    assert all(plan.cost.memory.arguments <= limit for plan in compiled)


# The compiler decides what is fast, where it is asked to decide.

SMALL_PLAN = 2**20  # bytes, far below the limit


def test_a_step_left_to_the_compiler_is_taken_where_its_program_is_faster(monkeypatch):
    compiled = compile_to(monkeypatch, lambda plan: SMALL_PLAN, lambda plan: 0 if plan.left_to_compiler else 2**30)
    plan = plan_of(deep_step, *DEEP, check=True)
    assert plan.left_to_compiler
    assert plan.cost.bytes_on_wire == 0
    assert "slower once compiled" in str(plan)
    assert len(compiled) <= 1 + 4


def test_a_baseline_is_taken_where_its_program_is_faster(monkeypatch):
    searched = plan_of(deep_step, *DEEP, check=False)
    baseline = searched.baselines["data parallel"]

    def sent(plan):
        return 0 if plan.cost == baseline and not plan.left_to_compiler else 2**30

    compile_to(monkeypatch, lambda plan: SMALL_PLAN, sent)
    plan = plan_of(deep_step, *DEEP, check=True)
    assert plan.cost == baseline
    assert "chosen because its compiled program costs less" in str(plan)


@pytest.mark.parametrize("sent", [0, 2**32])
def test_where_a_baseline_is_preferred_the_faster_plan_is_compiled_too_and_their_programs_decide(sent, monkeypatch):
    def mixed(params, batch):  # one weight is best replicated, and the other is best sharded
        def loss(params):
            return sum(jnp.mean(jnp.tanh(batch[name] @ params[name]) ** 2) for name in params)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    sizes = {"params": {"tall": (256, 256), "wide": (4096, 4096)}, "batch": {"tall": (65536, 256), "wide": (256, 4096)}}
    args = [{name: jax.ShapeDtypeStruct(size, np.float32) for name, size in each.items()} for each in sizes.values()]
    faster = plan_of(mixed, *args, constraints={}).sharding_constraints
    monkeypatch.setattr("penstock.shard.search.solver._CERTAIN", 100.0)
    preferred = plan_of(mixed, *args, constraints={})
    assert preferred.cost in preferred.baselines.values()
    assert preferred.sharding_constraints != faster
    compile_to(monkeypatch, lambda plan: SMALL_PLAN, lambda plan: sent if plan.sharding_constraints == faster else 2**31)
    plan = plan_of(mixed, *args, constraints={}, check=True)
    assert (plan.sharding_constraints == faster) == (sent == 0)


def test_programs_of_one_speed_leave_the_plan_that_the_search_found(monkeypatch):
    searched = plan_of(deep_step, *DEEP, check=False)
    compiled = compile_to(monkeypatch, lambda plan: SMALL_PLAN, lambda plan: 2**30)
    plan = plan_of(deep_step, *DEEP, check=True)
    assert plan.sharding_constraints == searched.sharding_constraints
    assert len(compiled) > 1


def test_of_near_ties_among_contenders_the_one_of_least_memory_is_taken(monkeypatch):
    searched = plan_of(deep_step, *DEEP, check=False)
    smallest = searched.baselines["FSDP"]
    compile_to(
        monkeypatch,
        lambda plan: SMALL_PLAN if plan.cost == smallest else 2 * SMALL_PLAN,
        lambda plan: 2**33 if plan.sharding_constraints == searched.sharding_constraints else 2**32,  # what is computed is little
    )
    assert plan_of(deep_step, *DEEP, check=True).checked.memory == SMALL_PLAN


def test_a_faster_program_that_does_not_fit_is_not_taken(monkeypatch):
    searched = plan_of(deep_step, *DEEP, check=False)
    limit = 4 * searched.cost.memory.total
    compile_to(
        monkeypatch,
        lambda plan: 2 * limit if plan.left_to_compiler else SMALL_PLAN,
        lambda plan: 0 if plan.left_to_compiler else 2**30,
    )
    assert not plan_of(deep_step, *DEEP, memory=limit, check=True).left_to_compiler


@pytest.mark.parametrize(("check", "sent"), [(None, 2**30), (True, 0)])
def test_contenders_are_compiled_only_on_request_and_for_a_program_that_costs_more(check, sent, monkeypatch):
    searched = plan_of(deep_step, *DEEP, check=False)
    limit = int(1.3 * searched.cost.memory.total)  # so near that None compiles too
    compiled = compile_to(monkeypatch, lambda plan: plan.cost.memory.total, lambda plan: sent)
    plan_of(deep_step, *DEEP, memory=limit, check=check)
    assert len(compiled) == 1


def test_a_contender_that_the_compiler_fails_on_leaves_the_plan(monkeypatch):
    def fail_if_left(plan):
        if plan.left_to_compiler:
            raise CompilerFailedError("the compiler crashed")
        return SMALL_PLAN

    compile_to(monkeypatch, fail_if_left, lambda plan: 2**30)
    plan = plan_of(deep_step, *DEEP, check=True)
    assert not plan.left_to_compiler
    assert not plan.unchecked


def test_a_program_that_exceeds_the_memory_of_the_chip_does_not_fit(monkeypatch):
    def out_of_memory(plan):
        raise CompilerMemoryError("out of memory", 3 * 2**30)

    compile_by(monkeypatch, out_of_memory)
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

    monkeypatch.setattr(compiler.subprocess, "Popen", start_and_kill)
    _, said = unchecked_plan(mesh={"data": 16}, check=True, memory="40KiB")
    assert "was killed (signal 9)" in said
    assert "plan again" in said


def test_a_compiler_that_hangs_leaves_the_plan_unchecked(monkeypatch):
    monkeypatch.setattr(compiler, "_TIMEOUT", 0.5)
    _, said = unchecked_plan(mesh={"data": 16}, check=None, memory="40KiB")
    assert "gave no answer in" in said


def test_a_plan_far_below_its_limit_is_unchecked_if_the_compiler_fails(monkeypatch, tmp_path):
    def fail(plan):
        raise CompilerFailedError("the compiler crashed")

    compile_by(monkeypatch, fail)
    plan, said = unchecked_plan(check=True)
    assert plan.cost.memory.total < 0.01 * plan.limit
    assert said.endswith("the plan likely fits, and another may be faster")
    assert "<1% of its limit" in said
    assert repr(plan).endswith(", unchecked>")
    plan.save(tmp_path / "plan.json")
    loaded = ps.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.unchecked


def test_a_plan_that_fits_is_returned_if_the_compiler_fails_later(monkeypatch):
    fast = plan_of(deep_step, *DEEP, check=False)
    compiled = []

    def dies_after_one(plan):
        if compiled:
            raise CompilerFailedError("it is gone")
        compiled.append(plan)
        return Measured(1, 0, plan.cost.memory.total // 2, 0, 1.0, (), 1.0)

    compile_by(monkeypatch, dies_after_one)
    plan = plan_of(deep_step, *DEEP, memory=int(0.6 * fast.cost.memory.total))
    assert plan.cost == compiled[0].cost
    assert plan.checked is not None


def test_small_arrays_are_sharded_for_memory_although_latency_dominates():
    """Check that the price on bytes rises until an array is sharded, where all time is latency."""

    def step(w, x):
        return w - 0.1 * (x.T @ (x @ w)), jnp.float32(0)

    args = (jax.ShapeDtypeStruct((64, 32), np.float32), jax.ShapeDtypeStruct((16, 64), np.float32))
    smallest = plan_of(step, *args, constraints={"w": jax.sharding.PartitionSpec(None, "data")}, check=False).cost.memory.total
    assert plan_of(step, *args, memory=int(1.2 * smallest), check=False).cost.memory.total <= 1.2 * smallest
