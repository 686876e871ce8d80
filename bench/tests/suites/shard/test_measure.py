"""Plans and layouts by hand are scored by the compiler that judges."""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.shard.limits import compile_to

import penstock as ps
from penstock.shard import Plan
from penstock_bench.suites.shard import planning
from penstock_bench.suites.shard.measure import asked_of, measure_task, plan_path
from penstock_bench.suites.shard.planning import Asked, hardware_of, plan_within
from penstock_bench.suites.shard.scores import BaselineScore
from penstock_bench.suites.shard.task import Compiler, Task
from penstock_bench.suites.shard.zoo import load


def asked(compiler: Compiler | None = None) -> Asked:
    def step(params, x):
        value, gradient = jax.value_and_grad(lambda w: ((jnp.tanh(x @ w)) ** 2).mean())(params)
        return params - 0.1 * gradient, value

    arrays = jax.ShapeDtypeStruct((256, 256), np.float32), np.zeros((64, 256), np.float32)
    return Asked(step, *arrays, {"mesh": {"data": 8}}, compiler or Compiler(), "float32")


@pytest.mark.slow
def test_a_plan_has_the_figures_of_the_compiler_and_the_seconds_without_it():
    score, made = plan_within(asked(), "loose", 2**30)
    assert "CPU compiler" in made.checked.compiled_for
    assert score.score.memory == made.checked.memory == made.verify().measured.memory
    assert score.predicted.memory == made.cost.memory.total
    assert score.planning > 0
    assert score.mesh == "data 8"


@pytest.mark.slow
def test_a_limit_that_the_compiler_says_is_not_kept_is_a_refusal():
    smallest = plan_within(asked(), "loose", 2**30)[0].score.arguments
    score, made = plan_within(asked(), "tight", smallest + 10)
    assert (score.refused, score.score, made) == (True, None, None)
    assert "no layout" in score.reason


def test_a_plan_that_is_left_to_the_compiler_is_scored_and_has_no_prediction(monkeypatch):
    limit = 2**20
    compile_to(monkeypatch, lambda plan: limit if plan.left_to_compiler else 1.2 * limit)
    score, made = plan_within(asked(), "tight", limit)
    assert made.left_to_compiler
    assert score.predicted is None
    assert score.score.memory == limit


def test_a_step_that_fails_is_no_refusal():
    def broken(params, x):
        raise KeyError("why")

    score, made = plan_within(replace(asked(), step=broken), "loose", 2**30)
    assert (score.refused, made) == (False, None)
    assert score.reason == "planning failed: KeyError: 'why'"


def test_a_limit_that_is_unknown_has_no_plan():
    assert "data parallel" in plan_within(asked(), "half", None)[0].reason


@pytest.mark.slow
def test_warnings_of_the_planner_are_in_the_score(monkeypatch):
    def warn(*given, **more):
        warnings.warn("the plan is unchecked: so it is said", stacklevel=2)
        return ps.plan(*given, **more)

    monkeypatch.setattr(planning, "plan", warn)
    assert plan_within(asked(), "loose", 2**30)[0].notes == ("the plan is unchecked: so it is said",)


def test_a_tpu_judged_by_the_cpu_compiler_is_hardware_of_its_own():
    cpu, tpu = hardware_of(Compiler()), hardware_of(Compiler("v5e:2x4"))
    assert (cpu.platform, tpu.platform, tpu.name) == ("cpu", "tpu", "tpu-v5e")
    assert (cpu.flops, cpu.link_bandwidth, cpu.memory) == (tpu.flops, tpu.link_bandwidth, tpu.memory)


@pytest.mark.slow
def test_a_task_has_three_limits_and_saves_its_plans(tmp_path):
    task = Task("mlp", "2x4")
    stale = plan_path(tmp_path, task, "loose")
    stale.write_text("an earlier run")
    tried, plans, _ = measure_task(task, tmp_path)
    scores = {each.name: each.score for each in tried if each.score}
    assert {"data parallel", "FSDP", "FSDP, gathered", "largest axis"} <= set(scores)
    assert [plan.limit for plan in plans] == ["loose", "half", "tight"]
    loose, half, tight = (plan.limit_bytes for plan in plans)
    assert loose == hardware_of(Compiler()).memory
    assert half == scores["data parallel"].memory // 2
    assert tight == int(1.02 * min(score.memory for score in scores.values()))
    for plan in plans:
        assert plan.score.memory <= plan.limit_bytes
        assert Plan.load(plan_path(tmp_path, task, plan.limit)).mesh_shape == task.axes


# As in tests/shard/test_compile_worker.py.
if importlib.util.find_spec("libtpu"):

    def test_the_tpu_compiler_judges_plans_and_layouts_by_hand(tmp_path):
        task = Task("mlp", "2x2", Compiler.of_label("v5e:2x2"), limits=("loose",))
        tried, (loose,), _ = measure_task(task, tmp_path)
        made = asked_of(task, load("mlp")).plan(loose.limit_bytes, check="v5e:2x2")
        assert made.checked.compiled_for == "the TPU compiler for v5e:2x2"
        assert loose.score.memory == made.checked.memory
        assert all(each.score.arguments % (8 * 128) == 0 for each in (loose, tried[0]))  # stored in tiles
        kept = {path: path.read_text() for path in (tmp_path / "compiled").glob("*.json")}
        assert len(kept) == sum(each.score is not None for each in tried)
        assert measure_task(replace(task, limits=()), tmp_path)[0] == tried
        assert {path: path.read_text() for path in (tmp_path / "compiled").glob("*.json")} == kept

    def test_a_layout_that_the_tpu_compiler_refuses_has_its_reason(tmp_path):
        tried: list[BaselineScore] = measure_task(Task("mlp", "2x4", Compiler("v5e:2x2"), limits=()), tmp_path)[0]
        assert all("topology v5e:2x2 has 4 devices" in each.reason for each in tried[:4])
