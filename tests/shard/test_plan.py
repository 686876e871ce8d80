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
from penstock.shard import PlanError


def comparable(tree):
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf, tree)


@pytest.mark.filterwarnings("ignore:the batch of")  # of two steps it does not divide
@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_a_plan_trains_like_one_device(make):
    step, state, batch = make()
    plan = planned(step, *state, batch, mesh=MESHES[STEPS.index(make) % 3])
    if make is not prime_sizes:
        assert sharded(plan)
    alone, together = jax.jit(step), plan.jit(step)
    ours, theirs = state, state
    for _ in range(3):
        *theirs, expected = alone(*theirs, batch)
        *ours, found = together(*ours, batch)
        assert_close(found, expected)
    assert_close(comparable(ours), comparable(theirs))
    assert_laid_out(tuple(ours), plan.shardings[: len(state)])


TIGHT = ("scanned_layers", "tied_embeddings", "attention")


@pytest.mark.parametrize("make", [make for make in STEPS if make.__name__ in TIGHT], ids=lambda make: make.__name__)
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


def test_the_error_says_how_much_is_too_much_and_what_is_largest():
    with pytest.raises(PlanError, match="no layout that was found fits 1 KiB a device on mesh data 2 × model 4") as raised:
        planned(mlp_step, mlp(), rows(), mesh=MESHES[1], memory="1KiB", check=True)
    for said in ("too much", "of 'params/in' float32[16, 32]", "of an activation float32[", "jax.checkpoint"):
        assert said in str(raised.value)


def test_a_lower_limit_is_kept_by_sharding_more():
    free = planned(mlp_step, mlp(64, 128), rows(16, 64), mesh={"data": 8}, constraints={"*": P()})
    limit = free.cost.memory.total // 2
    tight = planned(mlp_step, mlp(64, 128), rows(16, 64), mesh={"data": 8}, memory=limit)
    assert tight.cost.memory.total <= limit
    assert any(any(leaf.stored) for leaf in tight.inputs if leaf.role == "parameters")
    assert matches_one_device(tight, mlp_step, mlp(64, 128), rows(16, 64))


@pytest.mark.parametrize("memory", [0, -1, 0.4, True, float("nan"), float("inf"), "0B", "", ".", "16 gigs", "1.2.3GB"])
def test_a_limit_that_is_no_number_of_bytes_is_refused(memory):
    with pytest.raises(ValueError, match="memory="):
        planned(mlp_step, mlp(), rows(), mesh=MESHES[0], memory=memory)


@pytest.mark.parametrize("memory", [[1], {}, object(), 1j, 10**400])
def test_a_limit_of_another_type_is_refused(memory):
    with pytest.raises(TypeError, match=r"memory=.* is not a number of bytes nor a text such as '16GiB'"):
        planned(mlp_step, mlp(), rows(), mesh=MESHES[0], memory=memory)


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "under jit"])
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
