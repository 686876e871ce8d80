"""Arguments are created, put and fed in the shardings of a plan, on its devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tests.shard.assertions import assert_close, assert_laid_out
from tests.shard.example import plan_of
from tests.shard.steps import mlp, mlp_loss, mlp_step, rows, sgd

import penstock as ps


def in_parts(params, x, y):
    value, gradients = jax.value_and_grad(mlp_loss)(params, {"x": x, "y": y})
    return sgd(params, gradients), value


def host_rows(n=16):
    return {name: np.asarray(leaf)[:n] for name, leaf in rows().items()}


def test_init_creates_the_state_in_the_shardings_of_the_plan():
    plan = plan_of(mlp_step, mlp(), rows())
    state = plan.init(mlp)
    assert_laid_out(state, plan.shardings[0])
    assert_close(state, mlp())
    assert_laid_out(plan.put(rows()), plan.shardings[1])


def test_batches_are_fed_in_the_shardings_of_the_plan():
    plan = plan_of(mlp_step, mlp(), rows())
    loader = ps.Loader(host_rows(), batch_size=len(rows()["x"]), epochs=2)
    state, train = plan.init(mlp), plan.jit(mlp_step)
    with ps.feed(loader, to=plan) as batches:
        for batch in batches:
            assert jax.tree.map(lambda leaf: leaf.sharding, batch) == plan.shardings[1]
            state, loss = train(state, batch)
    assert np.isfinite(loss)


def test_several_batch_arguments_are_fed_as_a_tuple():
    plan = plan_of(in_parts, mlp(), rows()["x"], rows()["y"], constraints={"x": P("data"), "y": P(("data", "model"))})
    with ps.feed([(host_rows()["x"], host_rows()["y"])], to=plan) as batches:
        x, y = next(batches)
    assert (x.sharding.spec, y.sharding.spec) == (P("data", None), P(("data", "model"), None))
    assert np.isfinite(plan.jit(in_parts)(plan.init(mlp), x, y)[1])


def test_a_batch_that_does_not_divide_is_named():
    plan = plan_of(mlp_step, mlp(), rows())
    with ps.feed([host_rows(7)], to=plan) as batches, pytest.raises(ValueError, match=r"leaf 'x' of shape \(7, 16\) does not"):
        next(batches)


def masked_step(params, batch):
    def loss(params):
        hidden = jax.nn.relu(batch["x"] @ params["in"] + params["bias"])
        return jnp.mean(((hidden @ params["out"] - batch["y"]) ** 2).mean(-1), where=batch["mask"])

    value, gradients = jax.value_and_grad(loss)(params)
    return sgd(params, gradients), value


@pytest.mark.parametrize("transform", [None, lambda batch: {**batch, "x": batch["x"] * 1.0}], ids=["as read", "transformed"])
def test_the_mask_of_padded_batches_is_sharded_as_the_rows(transform):
    plan = plan_of(mlp_step, mlp(), rows(), constraints={"batch/x": P("data"), "batch/y": P(("data", "model"))})
    more = {name: np.concatenate([leaf, leaf[:3]]) for name, leaf in host_rows().items()}
    whole, short = (ps.Loader(data, 16, epochs=1, remainder="pad", shuffle=False) for data in (host_rows(), more))
    train = plan.jit(mlp_step)
    for each, filled in ((whole, [16]), (short, [16, 3])):
        with ps.feed(each, to=plan, transform=transform) as batches:
            masks = []
            for batch in batches:
                masks.append(batch.pop("mask"))
                assert_laid_out(batch, plan.batch_shardings)
                train(plan.put(mlp()), batch)
        assert [int(mask.sum()) for mask in masks] == filled
        assert {mask.sharding.spec for mask in masks} == {P(("data", "model"))}


def test_a_step_that_takes_the_mask_gets_it():
    batch = {**host_rows(), "mask": np.ones(16, bool)}
    plan = plan_of(masked_step, mlp(), batch)
    with ps.feed(ps.Loader(host_rows(11), batch_size=16, epochs=1, remainder="pad"), to=plan) as batches:
        for batch in batches:
            assert_laid_out(batch, plan.batch_shardings)
            _, loss = plan.jit(masked_step)(mlp(), batch)
            assert float(loss) == pytest.approx(float(mlp_loss(mlp(), jax.tree.map(lambda leaf: leaf[:11], host_rows(11)))))


def test_batches_that_the_step_does_not_take_are_described_in_a_few_words():
    deep = {f"layer {number}": {"x": leaf} for number in range(200) for leaf in host_rows().values()}
    plan = plan_of(lambda batch: batch["layer 0"]["x"].sum(), deep, constraints={})
    for batch in ({"other": host_rows()["x"]}, {**deep, "one more": host_rows()["x"]}):
        with pytest.raises(ValueError, match=r"not a prefix of .*; the batch has '(other|one more)', which `to` lacks") as caught:
            next(ps.feed([batch], to=plan))
        assert len(str(caught.value)) < 1000
    with pytest.raises(TypeError, match=r"neither a jax.Device nor a Sharding") as wrong:
        ps.feed([deep], to={"a": deep})
    assert len(str(wrong.value)) < 1000
    with pytest.raises(ValueError, match="no argument of the step is a batch") as none:
        ps.feed([deep], to=plan_of(lambda w: w * 2.0, deep["layer 0"]["x"], constraints={}))
    assert len(str(none.value)) < 1000


def test_a_plan_without_its_devices_or_its_step_refuses_to_feed(tmp_path):
    with pytest.raises(ValueError, match="the plan is for 16 devices"):
        ps.feed([host_rows()], to=plan_of(mlp_step, mlp(), rows(), mesh={"data": 4, "model": 4}))
    plan_of(mlp_step, mlp(), rows()).save(tmp_path / "plan.json")
    loaded = ps.Plan.load(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"plan\.bind\(step, \*args\) first"):
        ps.feed([host_rows()], to=loaded)
    assert loaded.bind(mlp_step, mlp(), rows()).batch_shardings == plan_of(mlp_step, mlp(), rows()).batch_shardings


def test_a_loaded_plan_takes_devices_in_their_order(tmp_path):
    plan_of(mlp_step, mlp(), rows()).save(tmp_path / "plan.json")
    backwards = jax.devices()[::-1]
    for devices in (backwards, np.array(backwards).reshape(2, 4)):
        loaded = ps.Plan.load(tmp_path / "plan.json", devices)
        assert list(loaded.mesh.devices.flat) == backwards
        state, _ = loaded.jit(mlp_step)(loaded.put(mlp()), rows())
        assert state["in"].sharding.mesh.devices.tolist() == loaded.mesh.devices.tolist()


def test_a_loaded_plan_refuses_another_number_of_devices(tmp_path):
    plan_of(mlp_step, mlp(), rows()).save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"is for 8 devices \(data 2 × model 4\), and 4 were given"):
        ps.Plan.load(tmp_path / "plan.json", jax.devices()[:4])


def test_the_representation_of_a_plan_is_one_line():
    shown = repr(plan_of(mlp_step, mlp(), rows()))
    assert re.fullmatch(
        r"<Plan: 8 × tpu-v5e, mesh data 2 × model 4, [\d.]+ [KMG]iB of 16 GiB a device, [\d.]+ \w+ a step>", shown
    )
