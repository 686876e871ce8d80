"""Planning pauses the garbage collector, and leaves it as it was."""

import gc

import jax
import numpy as np
import pytest

import penstock as ps
from penstock.shard.planning import without_collection


@pytest.fixture(params=[True, False], ids=["on", "off"])
def collecting(request):
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_the_collector_is_off_inside_of_a_block_and_as_before_after_it(collecting):
    with without_collection():
        assert not gc.isenabled()
        with without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == collecting


def test_the_collector_is_as_before_after_an_error(collecting):
    with pytest.raises(KeyError), without_collection():
        raise KeyError
    assert gc.isenabled() == collecting


def test_a_step_is_traced_without_the_collector_and_a_plan_leaves_it_as_it_was(collecting):
    seen = []

    def step(w, x):
        seen.append(gc.isenabled())
        return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)

    ps.plan(step, np.ones((16, 16), np.float32), np.ones((8, 16), np.float32), mesh={"data": 8}, hardware="tpu-v5e", check=False)
    assert seen
    assert not any(seen)
    assert gc.isenabled() == collecting
