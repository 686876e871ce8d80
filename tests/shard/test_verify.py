"""The compiler's figures for a plan are shown beside the prediction."""

from dataclasses import replace

from tests.shard.plans import collective, cost
from tests.shard.steps import mlp, mlp_step, rows, while_loop

import penstock as ps
from penstock.shard.hlo.analysis import Measured
from penstock.shard.hlo.collectives import Collective
from penstock.shard.unknown_costs import about_collectives
from penstock.shard.verify import Verified

LOOP = "1 loop of unknown length counts once: the true FLOPs, bytes sent and time are unknown"


def plan_of(step, *args):
    return ps.plan(step, *args, mesh={"data": 8}, hardware="tpu-v5e", check=False)


def test_a_loop_of_unknown_length_is_reported_for_both():
    step, state, batch = while_loop()
    verified = plan_of(step, *state, batch).verify()
    assert verified.predicted.unknown == verified.measured.unknown == (LOOP,)
    lines = str(verified).splitlines()
    assert [line for line in lines if "unknown" in line] == [f"predicted: {LOOP}", f"compiler: {LOOP}"]
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
