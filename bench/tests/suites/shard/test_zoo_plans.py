"""Every plan of the model zoo divides its leaves and predicts the bytes of its arguments."""

import math

import jax
import pytest
from tests.shard.steps import V5E_ON_CPU

import penstock as ps
from penstock_bench.suites.shard import zoo

MESH = {"data": 2, "model": 4}
SMALL = ("mlp", "lora", "graph")


def plan_of(name, **options):
    model = zoo.load(name)
    return ps.plan(model.step, jax.eval_shape(model.init), model.batch(0), **{"mesh": MESH, "hardware": "tpu-v5e", **options})


def assert_divides(leaf):
    axes = [axis for entry in leaf.stored for axis in entry]
    assert len(set(axes)) == len(axes)
    assert len(leaf.stored) in (0, len(leaf.shape))
    for size, entry in zip(leaf.shape, leaf.stored, strict=False):
        assert size % math.prod(MESH[axis] for axis in entry) == 0, leaf


@pytest.mark.parametrize("name", [*SMALL, *(pytest.param(each, marks=pytest.mark.slow) for each in zoo.ZOO if each not in SMALL)])
def test_every_layout_divides_its_leaf_and_state_returns_to_its_place(name):
    plan = plan_of(name, check=False)
    for leaf in (*plan.inputs, *plan.outputs):
        assert_divides(leaf)
    for place, source in plan.state.items():
        assert plan.outputs[place].stored == plan.inputs[source].stored
        assert plan.outputs[place].shape == plan.inputs[source].shape


@pytest.mark.parametrize("name", ["mlp", *(pytest.param(each, marks=pytest.mark.slow) for each in SMALL if each != "mlp")])
def test_arguments_take_the_bytes_that_were_predicted(name):
    plan = plan_of(name, check=False, hardware=V5E_ON_CPU)
    verified = plan.verify()
    # The compiled program drops a few unused scalars from its arguments.
    assert verified.measured.arguments == pytest.approx(plan.cost.memory.arguments, abs=64)
