"""Arrays that a step closes over are on every device, so that they count in the memory of a plan."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.shard.eager import like
from tests.shard.limits import AT_HAND
from tests.shard.steps import array, mlp, mlp_loss, mlp_step, rows, sgd

import penstock as ps

planned = functools.partial(ps.plan, mesh={"x": 8}, hardware=AT_HAND, check=False)
TABLE = np.ones((256, 16, 16), np.float32)
ON_DEVICE = jnp.asarray(TABLE, jnp.bfloat16)


def layers(x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, TABLE)[0]


def jitted_twice(x):
    apply = jax.jit(lambda x, index: x @ ON_DEVICE[index].astype(x.dtype))
    return apply(x, 0) + jax.jit(lambda x: x @ ON_DEVICE[1].astype(x.dtype))(x)


def looked_up(x):
    return x + jax.checkpoint(lambda x: jnp.asarray(TABLE)[jnp.argmax(x, -1), 0])(x)


def in_a_branch(x):
    return jax.lax.cond(x.sum() > 0, lambda x: x @ jnp.asarray(TABLE).sum(0), lambda x: x, x)


KINDS = {
    "layers": (layers, TABLE.nbytes, "float32[256, 16, 16]"),
    "jitted": (jitted_twice, ON_DEVICE.nbytes, "bfloat16[256, 16, 16]"),
    "looked up": (looked_up, TABLE.nbytes, "float32[256, 16, 16]"),
    "branch": (in_a_branch, TABLE.nbytes, "float32[256, 16, 16]"),
}


def step_with(features):
    def step(params, batch):
        loss, gradients = jax.value_and_grad(lambda params: mlp_loss(params, {**batch, "x": features(batch["x"])}))(params)
        return sgd(params, gradients), loss

    return step


@pytest.mark.parametrize("kind", KINDS)
def test_constants_count_and_are_named(kind):
    features, size, described = KINDS[kind]
    plan = planned(step_with(features), like(mlp()), like(rows()))
    assert plan.cost.memory.constants == size
    assert all(cost.memory.constants == size for cost in plan.baselines.values())
    assert plan.cost.memory.total == plan.cost.memory.arguments + size + plan.cost.memory.activations
    (remark,) = plan.remarks
    assert f"of {described} read at test_constants.py:" in remark
    assert "pass them as an argument of the step" in remark
    assert f"{size >> 10} KiB constants" in str(plan)
    measured = plan.verify().measured
    assert measured.constants == size
    assert measured.memory > size


@pytest.mark.parametrize("kind", ["layers", "jitted", "branch"])
@pytest.mark.parametrize("check", [None, True])
def test_a_limit_that_constants_exceed_is_refused_with_their_names(kind, check):
    features, size, described = KINDS[kind]
    with pytest.raises(ps.PlanError, match="the arguments and constants alone take") as refused:
        planned(step_with(features), like(mlp()), like(rows()), memory=size // 2, check=check)
    assert described in str(refused.value)


def test_constants_count_in_the_check():
    with pytest.raises(ps.PlanError, match="The step closes over 256 KiB of arrays"):
        planned(step_with(layers), like(mlp()), like(rows()), memory=TABLE.nbytes + 2048, check=None)


@pytest.mark.parametrize(
    "small", [lambda x: x * 2.0, lambda x: x + np.arange(16.0, dtype=np.float32), lambda x: x + array(16, 16)]
)
def test_small_constants_need_no_words(small):
    plan = planned(step_with(small), like(mlp()), like(rows()))
    assert (plan.cost.memory.constants, plan.remarks) == (0, ())


def test_an_argument_is_no_constant():
    def step(params, table, batch):
        return mlp_step(params, {**batch, "x": batch["x"] + table[0, 0]})

    assert planned(step, like(mlp()), like(TABLE), like(rows())).cost.memory.constants == 0


def test_plans_that_were_saved_without_constants_are_read(tmp_path):
    plan = planned(step_with(layers), like(mlp()), like(rows()))
    plan = dataclasses.replace(plan, checked=plan.verify().measured)
    plan.save(tmp_path / "plan")
    assert ps.Plan.load(tmp_path / "plan") == plan
    written = json.loads((tmp_path / "plan").read_text())
    for part in (written["cost"]["memory"], written["checked"], *(cost["memory"] for cost in written["baselines"].values())):
        del part["constants"]
    (tmp_path / "plan").write_text(json.dumps(written))
    assert ps.Plan.load(tmp_path / "plan").cost.memory.constants == 0
