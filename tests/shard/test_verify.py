"""The compiler's figures for a plan are shown beside the prediction."""

from dataclasses import replace

import numpy as np
import pytest
from tests.shard.plans import collective, cost
from tests.shard.steps import mlp, mlp_step, rows, while_loop

import penstock as ps
from penstock.errors import CompileError
from penstock.shard.compiler import compile_plan
from penstock.shard.hlo.analysis import Measured
from penstock.shard.hlo.collectives import Collective
from penstock.shard.verify import Verified, largest_difference
from penstock.shard.wording import about_collectives


def plan_of(step, *args):
    return ps.plan(step, *args, mesh={"data": 8}, hardware="tpu-v5e", check=False)


def test_a_loop_of_unknown_length_is_reported_for_both():
    step, state, batch = while_loop()
    verified = plan_of(step, *state, batch).verify()
    (loop,) = verified.predicted.unknown
    assert loop.startswith("1 loop of unknown length")
    assert verified.measured.unknown == (loop,)
    lines = str(verified).splitlines()
    assert [line for line in lines if "unknown" in line] == [f"predicted: {loop}", f"compiler: {loop}"]
    assert lines[-1].startswith("memory limit")


def test_without_unknown_costs_there_is_no_sentence():
    assert "unknown" not in str(plan_of(mlp_step, mlp(), rows()).verify())


def test_a_guessed_collective_is_marked_in_its_row():
    axes = ("a_long_name", "another")
    made = Measured(1, 1, 1, 1, 1e9, (Collective("reduce-scatter", 512, 8, 1.0, axes, guessed=True),), 0.0)
    text = str(Verified(cost(collective("all-reduce", axes, 1)), replace(made, unknown=about_collectives(1)), 2**30))
    assert "reduce-scatter over a_long_name, another (guessed) " in text
    assert "compiler: unknown whether 1 collective is an all-reduce or a reduce-scatter, taken by size" in text
    assert len({len(line) for line in text.splitlines()[1:7]}) == 1


def measured(flops):
    return Measured(1 << 20, 0, 3 << 20, 0, flops, (), 1.0)


def test_baselines_are_tabled_below_with_the_words_of_a_compiler_that_refuses_one():
    fits, over = (Verified(cost(), measured(2e12), limit) for limit in (4 << 20, (4 << 20) - 1))
    refused = CompileError("INTERNAL: the compiler\n  gave up\n" + "because " * 50)
    alone = str(fits)
    text = str(replace(fits, baselines={"data parallel": over, "FSDP": refused}))
    assert text.startswith(f"{alone}\n")
    title, plan, parallel, fsdp = text.removeprefix(alone + "\n").splitlines()
    assert title.split() == ["baselines:", "predicted,", "compiler", "memory", "FLOPs", "sent"]
    assert plan.split(maxsplit=2)[:2] == ["this", "plan"]
    for line, memory in ((plan, "5 GiB, 4 MiB  "), (parallel, "5 GiB, 4 MiB (over the limit)  ")):
        assert line[title.index("memory") :].startswith(memory)
        assert line[title.index("FLOPs") :].startswith("1e+12, 2e+12")
    assert fsdp.split(maxsplit=1) == ["FSDP", f"does not compile: {' '.join(str(refused).split())[:80]}"]


def test_a_plan_is_compiled_with_its_baselines_if_that_is_asked_for():
    plan = plan_of(mlp_step, mlp(64, 128), rows(64, 64))
    assert plan.verify().baselines == {}
    verified = plan.verify(baselines=True)
    assert list(verified.baselines) == list(plan.baselines) == ["data parallel", "FSDP", "Megatron"]
    for name, each in verified.baselines.items():
        assert each.predicted == plan.baselines[name]
        alone = plan.alternatives[name].verify()
        assert replace(each.measured, seconds_to_compile=0.0) == replace(alone.measured, seconds_to_compile=0.0)
        assert any(line.startswith(f"  {name} ") for line in str(verified).splitlines())
    assert verified.measured.seconds_to_compile > 0


def test_a_baseline_that_does_not_compile_leaves_the_others_and_the_plan(monkeypatch):
    plan = plan_of(mlp_step, mlp(64, 128), rows(64, 64))
    refused = CompileError("INTERNAL: no such layout")

    def compiled(record, *rest):
        if record == plan.alternatives["FSDP"]:
            raise refused
        return compile_plan(record, *rest)

    monkeypatch.setattr("penstock.shard.verify.compile_plan", compiled)
    verified = plan.verify(baselines=True)
    assert verified.baselines["FSDP"] is refused
    assert isinstance(verified.baselines["data parallel"], Verified)
    (row,) = (line for line in str(verified).splitlines() if line.startswith("  FSDP"))
    assert row.split(maxsplit=1) == ["FSDP", "does not compile: INTERNAL: no such layout"]


def test_a_plan_that_does_not_compile_raises_with_baselines_too(monkeypatch):
    def refuse(*_):
        raise CompileError("INTERNAL: no such layout")

    plan = plan_of(mlp_step, mlp(64, 128), rows(64, 64))
    monkeypatch.setattr("penstock.shard.verify.compile_plan", refuse)
    with pytest.raises(CompileError, match="no such layout"):
        plan.verify(baselines=True)


@pytest.mark.parametrize(
    ("expected", "found", "difference"),
    [
        ([[1.0, np.inf]], [[2.0, np.inf]], 1.0),  # relative to the finite numbers
        ([[1.0], [np.nan, 2.0]], [[1.0], [np.nan, 1.0]], 0.5),
        ([[4.0], [1.0]], [[3.0], [np.nan]], np.nan),  # in the second array too
        ([[1.0], [1.0]], [[np.inf], [1.0]], np.nan),
        ([[0.0]], [[1.0]], np.inf),
        ([[7], []], [[7], []], 0.0),
    ],
)
def test_the_largest_difference_of_results_is_found(expected, found, difference):
    one, other = ([np.array(each) for each in every] for every in (expected, found))
    assert largest_difference(one, other) == pytest.approx(difference, nan_ok=True)
