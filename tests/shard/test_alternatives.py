"""The baselines of a plan are plans, which run."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tests.shard.assertions import assert_close, assert_laid_out
from tests.shard.steps import array, mlp, mlp_step, rows, sgd

import penstock as ps

MESH = {"data": 2, "model": 2}
NAMES = ["data parallel", "ZeRO-1", "FSDP", "Megatron", "Megatron + FSDP"]
LAYERS, ROWS, TOKENS, WIDTH, HEADS, HIDDEN = 2, 16, 8, 32, 4, 64


def layer(x, w):
    """Return a layer of a transformer, x: [B, T, D]."""
    q, k, v = jnp.einsum("btd,dchk->cbthk", x, w["qkv"])
    mixed = jnp.einsum("bhqt,bthk->bqhk", jax.nn.softmax(jnp.einsum("bqhk,bthk->bhqt", q, k)), v)
    x = x + jnp.einsum("bqhk,hkd->bqd", mixed, w["out"])
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None


def transformer(remat):
    """Return a step with momentum of a scanned transformer, and its arguments."""
    scanned = jax.checkpoint(layer) if remat else layer

    def step(params, momentum, batch):
        def loss(params):
            x, _ = lax.scan(scanned, batch["x"], params)
            return jnp.mean((x - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return sgd(params, momentum), momentum, value

    params = {
        "qkv": array(LAYERS, WIDTH, 3, HEADS, WIDTH // HEADS, seed=1),
        "out": array(LAYERS, HEADS, WIDTH // HEADS, WIDTH, seed=2),
        "up": array(LAYERS, WIDTH, HIDDEN, seed=3),
        "down": array(LAYERS, HIDDEN, WIDTH, seed=4),
    }
    momentum = jax.tree.map(lambda p: 0.1 * p, params)
    return step, (params, momentum, {"x": array(ROWS, TOKENS, WIDTH, seed=5), "y": array(ROWS, TOKENS, WIDTH, seed=6)})


@functools.cache
def planned(remat):
    step, args = transformer(remat)
    return ps.plan(step, *args, mesh=MESH, hardware="tpu-v5e", check=False)


def small():
    return ps.plan(mlp_step, mlp(), rows(), mesh={"data": 8}, hardware="tpu-v5e", check=False)


def parts_of(plan, role):
    """Return into how many parts the leaves of a role are sharded."""
    leaves = [leaf for leaf in plan.inputs if leaf.role == role]
    return {int(np.prod([plan.mesh_shape[axis] for axis in leaf.mesh_axes])) for leaf in leaves}


def test_the_alternatives_are_the_rows_of_the_table_below_the_plan():
    plan = planned(remat=False)
    assert list(plan.alternatives) == list(plan.baselines) == NAMES
    assert len(plan.alternatives) == len(NAMES)
    for name, alternative in plan.alternatives.items():
        assert isinstance(alternative, ps.Plan)
        assert alternative.cost == plan.baselines[name]


def test_an_alternative_is_written_once_and_has_the_same_alternatives():
    plan = planned(remat=False)
    assert plan.alternatives["FSDP"] is plan.alternatives["FSDP"]
    assert plan.alternatives["FSDP"].alternatives["ZeRO-1"] == plan.alternatives["ZeRO-1"]


def test_the_alternatives_store_parameters_and_optimizer_as_their_names_say():
    made = planned(remat=False).alternatives
    parts = {name: (parts_of(each, "parameters"), parts_of(each, "optimizer")) for name, each in made.items()}
    assert parts.pop("Megatron") in (({2}, {2}), ({4}, {4}))  # over one axis or both, as is best by prediction
    assert parts == {
        "data parallel": ({1}, {1}),
        "ZeRO-1": ({1}, {4}),
        "FSDP": ({4}, {4}),
        "Megatron + FSDP": ({4}, {4}),
    }


QUICK = ("Megatron + FSDP", True)


@pytest.mark.parametrize(
    ("name", "remat"),
    [pytest.param(*each, marks=() if each == QUICK else pytest.mark.slow) for each in itertools.product(NAMES, (False, True))],
)
def test_an_alternative_computes_what_one_device_computes(name, remat):
    step, args = transformer(remat)
    alternative = planned(remat).alternatives[name]
    new, momentum, loss = alternative.jit(step)(*alternative.put(args))
    assert_close((new, momentum, loss), jax.jit(step)(*args), 1e-4)
    assert_laid_out((new, momentum), alternative.shardings[:2])


def test_an_unknown_alternative_is_refused_with_the_names_of_those_that_there_are():
    alternatives = small().alternatives
    with pytest.raises(KeyError, match=r"'fsdp'; there are 'data parallel', 'FSDP', 'Megatron'"):
        alternatives["fsdp"]
    assert "fsdp" not in alternatives
    assert repr(alternatives) == "<Alternatives: data parallel, FSDP, Megatron>"


def test_a_loaded_plan_has_the_costs_of_the_baselines_and_no_alternatives(tmp_path):
    plan = small()
    plan.save(tmp_path / "plan.json")
    loaded = ps.Plan.load(tmp_path / "plan.json")
    assert loaded.baselines == plan.baselines
    for each in (loaded, loaded.bind(mlp_step, mlp(), rows())):
        with pytest.raises(ValueError, match=r"only the costs of the baselines; ps\.plan"):
            _ = each.alternatives
        with pytest.raises(ValueError, match="only the costs of the baselines"):
            each.verify(baselines=True)
