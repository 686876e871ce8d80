"""Planned steps of all forms train on a mesh as they do on one device, within the memory limit."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from tests.shard.assertions import assert_close, assert_laid_out
from tests.shard.eager import MESHES, matches_one_device, planned, sharded
from tests.shard.steps import STEPS, array, mlp, mlp_step, prime_sizes, rows, sgd

import penstock as ps


def quick_first(steps, quick):
    """Return parameters of a test: the steps, of which only those with these names are quick."""
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(make, marks=marks[make.__name__ in quick], id=make.__name__) for make in steps]


def comparable(tree):
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf, tree)


QUICK = ("scanned_layers", "attention", "indexing", "odd_leaves", "prime_sizes")


@pytest.mark.filterwarnings("ignore:the batch of")  # of two steps it does not divide
@pytest.mark.parametrize("make", quick_first(STEPS, QUICK))
def test_a_plan_trains_like_one_device(make):
    step, state, batch = make()
    plan = planned(step, *state, batch, mesh=MESHES[STEPS.index(make) % 3])
    if make is not prime_sizes:
        assert sharded(plan)
    alone, together = jax.jit(step), plan.jit(step)
    theirs, ours = state, jax.device_put(tuple(state), plan.shardings[: len(state)])
    for _ in range(3):
        *theirs, expected = alone(*theirs, batch)
        *ours, found = together(*ours, batch)
        assert_close(found, expected)
    assert_close(comparable(ours), comparable(theirs))
    assert_laid_out(tuple(ours), plan.shardings[: len(state)])


TIGHT = ("scanned_layers", "tied_embeddings", "attention")


@pytest.mark.parametrize("make", quick_first([make for make in STEPS if make.__name__ in TIGHT], ("tied_embeddings",)))
def test_a_plan_with_a_low_memory_limit_computes_the_same_as_one_device(make):
    step, state, batch = make()
    args, mesh = (*state, batch), MESHES[2 - STEPS.index(make) % 2]
    limit = planned(step, *args, mesh=mesh).cost.memory.total
    plan = None
    while plan is None or limit > 64:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the last plan is above its limit
            lower = planned(step, *args, mesh=mesh, memory=limit)
        if lower.cost.memory.total > limit:
            break
        plan, limit = lower, int(0.8 * lower.cost.memory.total)
    assert any(any(leaf.stored) for leaf in plan.inputs)
    assert matches_one_device(plan, step, *args)


def test_a_lower_limit_is_kept_by_sharding_more():
    free = planned(mlp_step, mlp(64, 128), rows(16, 64), mesh={"data": 8}, constraints={"*": P()})
    limit = free.cost.memory.total // 2
    tight = planned(mlp_step, mlp(64, 128), rows(16, 64), mesh={"data": 8}, memory=limit)
    assert tight.cost.memory.total <= limit
    assert any(any(leaf.stored) for leaf in tight.inputs if leaf.role == "parameters")
    assert matches_one_device(tight, mlp_step, mlp(64, 128), rows(16, 64))


@pytest.mark.parametrize("memory", [0, -1, 0.4, True, float("nan"), float("inf"), "0B", "", "1.2.3GB"])
def test_a_limit_that_is_no_number_of_bytes_is_refused(memory):
    with pytest.raises(ValueError, match="memory="):
        planned(mlp_step, mlp(), rows(), mesh=MESHES[0], memory=memory)


@pytest.mark.parametrize("memory", [[1], 1j, pytest.param(10**400, id="10**400")])
def test_a_limit_of_another_type_is_refused(memory):
    with pytest.raises(TypeError, match=r"memory=.*16GiB"):
        planned(mlp_step, mlp(), rows(), mesh=MESHES[0], memory=memory)


@pytest.mark.parametrize("nested", [pytest.param(False, marks=pytest.mark.slow, id="plain"), pytest.param(True, id="under jit")])
def test_fsdp_gathers_weights_again_where_checkpoint_computes_a_layer_again(nested):
    def block(w, x):
        return x + jnp.tanh(x @ w["up"]) @ w["down"]

    def step(state, x):
        def loss(state):
            y = x
            for w in state:
                y = jax.checkpoint(jax.jit(block) if nested else block)(w, y)
            return (y**2).mean()

        value, gradients = jax.value_and_grad(loss)(state)
        return sgd(state, gradients), value

    def args(rows, width, hidden):
        return [{"up": array(width, hidden), "down": array(hidden, width)} for _ in range(2)], array(rows, width)

    large = jax.eval_shape(lambda: args(65_536, 256, 512))
    plan = ps.plan(step, *large, mesh={"data": 8}, hardware="tpu-v5e", check=False).alternatives["FSDP"]
    (gathers,) = (each.count for each in plan.cost.collectives if each.kind == "all-gather")
    assert gathers == 8  # two of each weight
    assert sum(each.count for each in plan.verify().measured.collectives if each.kind == "all-gather") == gathers
    small = args(64, 16, 32)
    assert matches_one_device(planned(step, *small, mesh=MESHES[1], constraints={"state/*": P("data")}), step, *small)
