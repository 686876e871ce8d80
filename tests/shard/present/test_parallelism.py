"""The kinds of parallelism of a plan are named in the words of the field."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from tests.shard.plans import BATCH, TENSOR, collective, leaf, megatron, plan, spec, with_moments

import penstock as ps
from penstock.shard.present.parallelism import count_layers, describe_axis
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
    constraints = {"state/*": P("data", None)}
    made = ps.plan(_train(_loss), *arguments, mesh={"data": 8}, hardware="tpu-v5e", constraints=constraints, check=False)
    assert describe_axis(made, "data")[:2] == ["batch", "ZeRO-3"]


def _scanned_loss(wrap):
    def loss(params, batch):
        def layer(x, weights):
            return x + jax.nn.relu(x @ weights["w1"]) @ weights["w2"], None

        x, _ = jax.lax.scan(wrap(layer), batch["x"], params["layers"])
        return jnp.mean((x - batch["y"]) ** 2)

    return loss


@pytest.mark.parametrize("wrap", [lambda layer: layer, jax.checkpoint])
def test_collectives_of_scanned_layers_are_counted_by_layer(wrap):
    """Check tensor parallelism, where each layer sums its activations."""
    _, batch = _arguments(512, 1024, 1024)
    params = {"layers": {name: jax.ShapeDtypeStruct((16, 1024, 1024), "float32") for name in ("w1", "w2")}}
    made = ps.plan(
        _train(_scanned_loss(wrap)),
        {"params": params, "moments": params},
        batch,
        mesh={"model": 8},
        hardware="tpu-v5e",
        constraints={"state/*/w1": P(None, None, "model"), "state/*/w2": P(None, "model", None)},
        check=False,
    )
    assert [leaf.slices for leaf in made.inputs if leaf.role == "parameters"] == [16, 16]
    made = made.alternatives["Megatron"]
    sums = sum(each.count for each in made.cost.collectives if each.kind == "all-reduce")
    assert sums >= 32
    assert any(f"{round(sums / 16)} all-reduces" in each and each.endswith("a layer") for each in describe_axis(made, "model"))


def test_the_update_of_sharded_state_is_no_part_of_tensor_parallelism():
    """Check the step of a linear model, whose update takes a quarter of the time."""

    def step(w, batch):
        return w - 0.1 * (batch["x"].T @ (batch["x"] @ w - batch["y"])), jnp.float32(0)

    square = jax.ShapeDtypeStruct((512, 512), "float32")
    args = (square, {"x": square, "y": square})
    made = ps.plan(step, *args, mesh={"data": 8}, hardware="tpu-v5e", check=False).alternatives["FSDP"]
    assert made.axis_work["data"]["state"] > 0.1
    assert describe_axis(made, "data")[:2] == ["batch", "ZeRO-3"]


def test_updates_that_take_most_of_the_time_are_mentioned():
    work = {"data": {"batch": 0.2, "tensor": 0.0, "state": 0.8, "idle": 0.0}}
    made = plan(with_moments("w", (512, 512), ROWS, REPLICATED, ROWS), {"data": 8}, work)
    assert describe_axis(made, "data")[:2] == ["batch 20%", "updates and casts of the state 80%"]


def test_state_with_a_batch_dimension_is_an_activation():
    def step(state, batch):
        hidden = jnp.tanh(state["hidden"] + batch @ state["w"])
        return {"hidden": hidden, "w": state["w"]}, hidden.sum()

    rows, square = (jax.ShapeDtypeStruct((count, 512), "float32") for count in (64, 512))
    wide, options = {"state/*": P(None, "model")}, {"hardware": "tpu-v5e", "check": False}
    made = ps.plan(step, {"hidden": rows, "w": square}, rows, mesh={"model": 8}, constraints=wide, **options)
    assert describe_axis(made, "model")[0] == "tensor parallel"


def _loss_with_transposed_kernels(params, batch):
    """Return the loss of layers that store their kernels as [features, inputs], as the GPT-2 of Hugging Face does."""
    x = batch["x"]
    for layer in params["layers"]:
        x = x + jax.nn.relu(x @ layer["up"].T) @ layer["down"].T
    return jnp.mean((x - batch["y"]) ** 2)


def _arguments_with_transposed_kernels(rows, width, hidden):
    (state, batch) = _arguments(rows, width, hidden)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[::-1], leaf.dtype), state), batch


def test_kernels_that_are_read_transposed_are_tensor_parallel_in_their_own_orientation():
    arguments = _arguments_with_transposed_kernels(128, 4096, 16384)
    made = ps.plan(_train(_loss_with_transposed_kernels), *arguments, mesh={"model": 8}, hardware="tpu-v5e", check=False)
    assert describe_axis(made, "model")[0].startswith("tensor parallel")
    used = {leaf.path: leaf.used for leaf in made.inputs if leaf.role == "parameters"}
    assert used["state/params/layers/0/up"] == spec("model", None)
    assert used["state/params/layers/0/down"] == spec(None, "model")


def test_kernels_that_are_read_transposed_are_zero_3():
    arguments = _arguments_with_transposed_kernels(1 << 15, 2048, 8192)
    rows = {"state/*": P("data", None)}
    made = ps.plan(
        _train(_loss_with_transposed_kernels), *arguments, mesh={"data": 8}, hardware="tpu-v5e", constraints=rows, check=False
    )
    assert describe_axis(made, "data")[:2] == ["batch", "ZeRO-3"]


def test_large_parameters_and_a_small_batch_are_tensor_parallel():
    arguments = _arguments(128, 4096, 16384)
    made = ps.plan(_train(_loss), *arguments, mesh={"model": 8}, hardware="tpu-v5e", check=False)
    assert describe_axis(made, "model")[0].startswith("tensor parallel")
    assert any(words.endswith("a layer") for words in describe_axis(made, "model"))


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["layers/0/w", "layers/1/w", "layers/2/w", "embedding"], (3, "layer")),
        (["block0/w", "block1/w"], (2, "block")),
        (["0/w", "1/w"], (2, "layer")),
        (["layers/0/w", "layers/0/mlp/0/w", "layers/1/w", "layers/1/mlp/0/w"], (2, "layer")),
        (["encoder/0/w", "encoder/1/w", "decoder/0/w", "decoder/1/w"], None),
        (["layers/0/w", "layers/1/v"], None),
        (["layers/0/w", "layers/1/w", "layers/2/v"], None),
        (["w", "v"], None),
    ],
)
def test_layers_are_equal_parts_with_numbers(paths, found):
    made = plan([leaf(f"state/params/{path}", (512, 512), REPLICATED) for path in paths], {"data": 2}, {"data": BATCH})
    assert count_layers(made) == found


@pytest.mark.parametrize(
    ("leaves", "found"),
    [
        ({"layers/w1": (16, 64, 64), "layers/w2": (16, 64, 64), "embedding": (100, 64)}, (16, "layer")),
        ({"layers/w1": (16, 64, 64), "layers/norm1": (16, 64), "layers/norm2": (16, 64)}, (16, "layer")),
        ({"blocks/w": (16, 64, 64)}, (16, "block")),
        ({"blocks/attention/w": (16, 64, 64), "blocks/mlp/w": (4, 4, 64, 64)}, (16, "block")),
        ({"encoder/w": (16, 64, 64), "decoder/w": (16, 64, 64)}, (16, "layer")),
        ({"encoder/w": (16, 64, 64), "decoder/w": (8, 64, 64)}, None),
        ({"layers/w": (16, 64, 64), "tail/0/w": (64, 64), "tail/1/w": (64, 64)}, None),
        ({"layers/0/w": (64, 64), "layers/1/w": (64, 64), "scales": (16, 64)}, (2, "layer")),
        ({"scales": (16, 64)}, None),
    ],
)
def test_layers_are_the_slices_that_loops_take_of_stacked_matrices(leaves, found):
    """Check leaves whose first dimensions a loop has stacked, of 16 or 8 slices together."""

    def sliced(shape):
        return 16 if shape[0] == 16 or shape[:2] == (4, 4) else 8 if shape[0] == 8 else 1

    parameters = [
        replace(leaf(f"state/params/{path}", shape, ((),) * len(shape)), slices=sliced(shape)) for path, shape in leaves.items()
    ]
    assert count_layers(plan(parameters, {"data": 2}, {"data": BATCH})) == found
