"""The kinds of parallelism of a plan are named in the words of the field."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from tests.shard.plans import BATCH, TENSOR, collective, leaf, megatron, plan, spec, with_moments

import penstock as ps
from penstock.shard.present.parallelism import describe_axis
from penstock.shard.present.text import plan_text

REPLICATED, ROWS = spec(None, None), spec("data", None)


def test_megatron_is_tensor_parallel_with_its_collectives_by_layer():
    assert describe_axis(megatron(), "model") == ["tensor parallel", "4 all-reduces a layer"]
    assert describe_axis(megatron(), "data") == ["batch", "ZeRO-1", "2 reduce-scatters a layer"]


@pytest.mark.parametrize(
    ("stored", "used", "kept", "words"),
    [
        (REPLICATED, REPLICATED, REPLICATED, ["batch"]),
        (ROWS, REPLICATED, ROWS, ["batch", "ZeRO-3"]),
        (REPLICATED, REPLICATED, ROWS, ["batch", "ZeRO-1"]),
    ],
)
def test_zero_is_named_by_the_leaves_that_are_stored_sharded(stored, used, kept, words):
    made = plan(with_moments("w", (512, 512), stored, used, kept), {"data": 8}, {"data": BATCH})
    assert describe_axis(made, "data") == words


@pytest.mark.parametrize("used", [None, ROWS])
def test_a_leaf_that_is_stored_as_it_is_used_is_not_called_zero(used):
    made = plan(with_moments("w", (512, 512), ROWS, used, ROWS), {"data": 8}, {"data": BATCH})
    assert describe_axis(made, "data") == ["batch"]


def test_a_part_of_the_parameters_has_its_share():
    leaves = [
        *with_moments("big", (300, 512), ROWS, REPLICATED, ROWS),
        *with_moments("small", (100, 512), REPLICATED, REPLICATED, REPLICATED),
    ]
    made = plan(leaves, {"data": 2}, {"data": BATCH})
    assert describe_axis(made, "data") == ["batch", "ZeRO-3 for 75% of the parameters"]


def test_an_axis_with_several_uses_has_shares_of_the_compute():
    wide = spec(None, "model")
    leaves = with_moments("w", (512, 512), wide, wide, wide)
    work = {"model": {"batch": 0.6, "tensor": 0.3, "idle": 0.1}}
    assert describe_axis(plan(leaves, {"model": 4}, work), "model") == ["batch 60%", "tensor parallel 30%", "idle 10%"]


def test_sharded_compute_with_replicated_parameters_is_not_called_tensor_parallel():
    made = plan(with_moments("w", (512, 512), REPLICATED, REPLICATED, REPLICATED), {"model": 4}, {"model": TENSOR})
    assert describe_axis(made, "model") == ["other dimensions of activations"]


def test_an_axis_without_use_is_idle():
    made = plan(
        [leaf("x", (7, 7), REPLICATED, REPLICATED)],
        {"a": 2, "b": 1},
        {axis: {"batch": 0.0, "tensor": 0.0, "idle": 1.0} for axis in "ab"},
    )
    assert describe_axis(made, "a") == ["idle: all devices along it compute the same"]
    assert describe_axis(made, "b") == ["one device, shards nothing"]


def test_collectives_that_send_little_are_only_in_the_table():
    made = plan(
        [], {"data": 2}, {"data": BATCH}, collective("all-reduce", ("data",), 3), collective("all-gather", ("data",), 90, 10.0)
    )
    assert describe_axis(made, "data") == ["batch", "3 all-reduces a step"]
    assert "all-gather over data" in plan_text(made)


def _train(loss):
    def step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["moments"], gradients)
        return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments), "moments": moments}, value

    return step


def _loss(params, batch):
    x = batch["x"]
    for layer in params["layers"]:
        x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
    return jnp.mean((x - batch["y"]) ** 2)


def _arguments(rows, width, hidden):
    layer = {
        "up": jax.ShapeDtypeStruct((width, hidden), "float32"),
        "down": jax.ShapeDtypeStruct((hidden, width), "float32"),
    }
    params = {"layers": [layer, layer]}
    rows = jax.ShapeDtypeStruct((rows, width), "float32")
    return {"params": params, "moments": params}, {"x": rows, "y": rows}


def test_small_parameters_and_a_large_batch_are_data_parallel():
    made = ps.plan(_train(_loss), *_arguments(1 << 16, 32, 64), mesh={"data": 8}, hardware="tpu-v5e")
    assert describe_axis(made, "data")[0] == "batch"
    assert "tensor parallel" not in str(made)


def test_sharded_parameters_with_a_large_batch_are_zero_3():
    arguments = _arguments(1 << 15, 2048, 8192)
    made = ps.plan(_train(_loss), *arguments, mesh={"data": 8}, hardware="tpu-v5e", constraints={"state/*": P("data", None)})
    assert describe_axis(made, "data")[:2] == ["batch", "ZeRO-3"]


def test_large_parameters_and_a_small_batch_are_tensor_parallel():
    made = ps.plan(_train(_loss), *_arguments(128, 4096, 16384), mesh={"model": 8}, hardware="tpu-v5e")
    assert describe_axis(made, "model")[0].startswith("tensor parallel")
    assert any(words.endswith("a layer") for words in describe_axis(made, "model"))
