"""Plans whose step is left to the compiler, before a refusal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.shard.limits import DEEP, compile_to, deep_step, plan_of
from tests.shard.steps import mlp, mlp_step, rows

import penstock as ps
from penstock.errors import CompilerFailedError, PlanError
from penstock.shard import compiler

pytestmark = pytest.mark.usefixtures("refusals_name_no_options")


@pytest.fixture
def left(monkeypatch):
    """Return a plan whose step is left to the compiler, and its limit: all others need 1.2 times the limit."""
    limit = int(1.5 * plan_of(deep_step, *DEEP, check=False).baselines["FSDP"].memory.arguments)
    compile_to(monkeypatch, lambda plan: limit if plan.left_to_compiler else 1.2 * limit)
    return plan_of(deep_step, *DEEP, memory=limit), limit


def test_a_plan_left_to_the_compiler_is_taken_before_a_refusal(left):
    plan, limit = left
    assert plan.left_to_compiler
    assert plan.checked.memory == plan.cost.memory.total == limit
    assert not plan.sharding_constraints.operands
    assert "the compiler chooses the layouts inside of the step" in str(plan)


def test_a_plan_for_which_the_compiler_aborts_is_passed_over_where_the_compiler_chooses(monkeypatch):
    limit = int(1.5 * plan_of(deep_step, *DEEP, check=False).baselines["FSDP"].memory.arguments)
    tried = []

    def needs(plan):
        if plan.left_to_compiler:
            tried.append(plan)
            if len(tried) == 1:
                raise CompilerFailedError("the process that compiled it crashed (signal 6)")
        return limit if plan.left_to_compiler else 1.2 * limit

    compile_to(monkeypatch, needs)
    assert plan_of(deep_step, *DEEP, memory=limit).left_to_compiler
    assert len(tried) > 1


def test_a_plan_left_to_the_compiler_of_cpus_is_compiled_in_another_process(left, monkeypatch):
    """XLA's partitioner may abort, which would end this process."""
    plan, _ = left
    monkeypatch.undo()
    elsewhere, measure = [], compiler.measure_exported
    monkeypatch.setattr(
        compiler, "measure_exported", lambda programs, **options: elsewhere.extend(programs) or measure(programs, **options)
    )
    assert plan.verify().measured.arguments == plan.cost.memory.arguments
    assert len(elsewhere) == 1
    plan.alternatives["FSDP"].verify()
    assert len(elsewhere) == 1


def test_a_plan_left_to_the_compiler_is_saved_and_trains(left, tmp_path):
    plan, _ = left
    plan.save(tmp_path / "plan.json")
    assert ps.Plan.load(tmp_path / "plan.json") == plan
    keys = jax.random.split(jax.random.key(0), 4)
    params, batch = [jax.random.normal(key, (512, 512)) / 32 for key in keys], jnp.ones((2048, 512))
    expected = jax.jit(deep_step)(params, batch)
    found = plan.jit(deep_step)(plan.put(params), plan.put(batch))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5), found, expected)


def test_plans_left_to_the_compiler_cost_what_their_programs_say(left):
    plan, _ = left
    assert plan.cost.flops == plan.checked.flops == 1.0
    assert plan.cost.collectives == ()


def test_a_refusal_names_no_prediction_of_a_plan_left_to_the_compiler(monkeypatch):
    limit = int(1.5 * plan_of(deep_step, *DEEP, check=False).baselines["FSDP"].memory.arguments)
    for left, said in ((1.1, False), (1.3, True)):
        compile_to(monkeypatch, lambda plan, left=left: (left if plan.left_to_compiler else 1.2) * limit)
        with pytest.raises(PlanError, match="no layout that was found fits") as refused:
            plan_of(deep_step, *DEEP, memory=limit)
        assert ("predicted to need" in str(refused.value)) is said


def test_few_are_left_to_the_compiler_if_all_plans_are_far_too_large(monkeypatch):
    limit = int(1.5 * plan_of(deep_step, *DEEP, check=False).baselines["FSDP"].memory.arguments)
    compiled = compile_to(monkeypatch, lambda plan: 2 * limit)
    with pytest.raises(PlanError):
        plan_of(deep_step, *DEEP, memory=limit)
    left = [plan for plan in compiled if plan.left_to_compiler]
    assert 1 <= len(left) <= 2
    assert len({tuple(leaf.stored for leaf in plan.inputs) for plan in left}) == 1


def test_a_plan_left_to_the_compiler_is_taken_even_if_all_others_are_far_too_large(monkeypatch):
    """Such a step: with convolutions of many groups, layouts inside of the step took twice the memory."""
    limit = int(1.5 * plan_of(deep_step, *DEEP, check=False).baselines["FSDP"].memory.arguments)
    compile_to(monkeypatch, lambda plan: limit if plan.left_to_compiler else 3 * limit)
    assert plan_of(deep_step, *DEEP, memory=limit).left_to_compiler


def test_layouts_over_one_axis_are_tried_whatever_is_predicted_for_them(monkeypatch):
    def over_one_axis(plan):
        return {leaf.mesh_axes for leaf in plan.inputs if leaf.role == "parameters"} == {(), ("data",)}

    args, options = (mlp(64, 128), rows(2048, 64)), {"mesh": {"data": 4, "model": 2}}
    limit = plan_of(mlp_step, *args, **options, check=False).baselines["FSDP"].memory.total // 2
    compile_to(monkeypatch, lambda plan: limit if plan.left_to_compiler and over_one_axis(plan) else 1.4 * limit)
    assert over_one_axis(plan_of(mlp_step, *args, **options, memory=limit))
