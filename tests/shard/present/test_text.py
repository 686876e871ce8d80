from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from tests.shard.plans import BATCH, GIB, TENSOR, collective, leaf, megatron, plan, spec, with_moments

import penstock as ps
from penstock.shard.hlo.analysis import Measured
from penstock.shard.present.leaf_table import count_layers, group_layers
from penstock.shard.present.parallelism import describe_axis
from penstock.shard.present.text import plan_text

WHOLE, ROWS = spec(None, None), spec("data", None)


def test_megatron_is_tensor_parallel_with_its_collectives_by_layer():
    assert describe_axis(megatron(), "model") == ["tensor parallel", "4 all-reduces a layer"]
    assert describe_axis(megatron(), "data") == ["batch", "ZeRO-1", "2 reduce-scatters a layer"]


@pytest.mark.parametrize(
    ("stored", "used", "kept", "words"),
    [
        (WHOLE, WHOLE, WHOLE, ["batch"]),
        (ROWS, WHOLE, ROWS, ["batch", "ZeRO-3"]),
        (WHOLE, WHOLE, ROWS, ["batch", "ZeRO-1"]),
    ],
)
def test_data_parallel_is_named_by_what_is_stored_in_parts(stored, used, kept, words):
    made = plan(with_moments("w", (512, 512), stored, used, kept), {"data": 8}, {"data": BATCH})
    assert describe_axis(made, "data") == words


@pytest.mark.parametrize("used", [None, ROWS])
def test_a_leaf_that_is_stored_as_it_is_used_is_not_called_zero(used):
    made = plan(with_moments("w", (512, 512), ROWS, used, ROWS), {"data": 8}, {"data": BATCH})
    assert describe_axis(made, "data") == ["batch"]


def test_a_part_of_the_parameters_is_said_as_a_share():
    leaves = [*with_moments("big", (300, 512), ROWS, WHOLE, ROWS), *with_moments("small", (100, 512), WHOLE, WHOLE, WHOLE)]
    made = plan(leaves, {"data": 2}, {"data": BATCH})
    assert describe_axis(made, "data") == ["batch", "ZeRO-3 for 75% of the parameters"]


def test_an_axis_that_does_several_things_has_shares_of_the_computing():
    wide = spec(None, "model")
    leaves = with_moments("w", (512, 512), wide, wide, wide)
    work = {"model": {"batch": 0.6, "tensor": 0.3, "idle": 0.1}}
    assert describe_axis(plan(leaves, {"model": 4}, work), "model") == ["batch 60%", "tensor parallel 30%", "idle 10%"]


def test_computing_in_parts_with_whole_parameters_is_not_called_tensor_parallel():
    made = plan(with_moments("w", (512, 512), WHOLE, WHOLE, WHOLE), {"model": 4}, {"model": TENSOR})
    assert describe_axis(made, "model") == ["other dimensions of activations"]


def test_an_axis_without_use_is_idle():
    made = plan(
        [leaf("x", (7, 7), WHOLE, WHOLE)], {"a": 2, "b": 1}, {axis: {"batch": 0.0, "tensor": 0.0, "idle": 1.0} for axis in "ab"}
    )
    assert describe_axis(made, "a") == ["idle: all devices along it compute the same"]
    assert describe_axis(made, "b") == ["one device, shards nothing"]


def test_collectives_that_send_little_are_left_to_the_table():
    made = plan(
        [], {"data": 2}, {"data": BATCH}, collective("all-reduce", ("data",), 3), collective("all-gather", ("data",), 90, 10.0)
    )
    assert describe_axis(made, "data") == ["batch", "3 all-reduces a step"]
    assert "all-gather over data" in plan_text(made)


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
def test_layers_are_numbered_alike_parts(paths, found):
    made = plan([leaf(f"state/params/{path}", (512, 512), WHOLE) for path in paths], {"data": 2}, {"data": BATCH})
    assert count_layers(made) == found


def test_alike_leaves_are_one_line_with_their_moments():
    rows = group_layers(megatron())
    assert [(row.path, len(row.leaves)) for row in rows] == [
        ("state/params/layers/*/up", 4),
        ("state/params/layers/*/down", 4),
        ("batch/tokens", 1),
    ]
    assert rows[0].moments == (spec("data", "model"),)
    matrix = 512 * 2048 * 4
    assert rows[0].bytes == 4 * (matrix / 4 + 2 * matrix / 8)


def test_report_has_mesh_axes_costs_and_leaves():
    text = str(megatron())
    for words in [
        "8 × tpu-v5e, mesh data 2 × model 4, limit 16 GiB a device",
        "model (4): tensor parallel, 4 all-reduces a layer",
        "replicated, data parallel",
        "over the limit",
        "31%",  # of the limit: 5 of 16 GiB
        "1 GiB parameters, 2 GiB optimizer, 1000 B batch, 2 GiB activations",
        "all-reduce over model",
        "state/params/layers/*/up    ×4  float32[512,2048]",
        "P(None, 'model')",
        "P('data', 'model')",
    ]:
        assert words in text
    assert "over the limit" not in text.splitlines()[4]


def test_report_has_what_the_compiler_said():
    made = replace(megatron(), checked=Measured(GIB, GIB, 7 * GIB, GIB, 1e12, (), 1.0))
    assert "the compiler says 8 GiB, 50% of the limit" in str(made)


@pytest.mark.parametrize("sentence", ["1 loop of unknown length counts once", "words " * 40])
def test_report_says_what_is_unknown_below_the_times(sentence):
    made = megatron()
    lines = str(replace(made, cost=replace(made.cost, unknown=(sentence,)))).splitlines()
    table = next(at for at, line in enumerate(lines) if "replicated, data parallel" in line)
    said = " ".join(line.strip() for line in lines[table + 1 : lines.index("", table)])
    assert said == sentence.strip()
    assert max(map(len, lines)) <= 130


@pytest.mark.parametrize("count", [1, 30, 500])
def test_report_is_one_screen(count):
    path = "state/params/" + "a_very_long_name/" * 12
    leaves = [leaf(f"{path}{chr(97 + n % 26) * (n // 26 + 1)}", (64, 64), spec(("data", "model"), None)) for n in range(count)]
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    collectives = [collective(kind, axes, 1e6) for kind in kinds for axes in [("data",), ("model",), ("data", "model")]]
    lines = plan_text(plan(leaves, {"data": 2, "model": 4}, {"data": BATCH, "model": TENSOR}, *collectives)).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 130
    assert [line for line in lines if line.endswith(" ")] == []
    assert ("more" in lines[-1]) == (count > 1 + 25)


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


def _arguments(rows, width, overlapped):
    layer = {
        "up": jax.ShapeDtypeStruct((width, overlapped), "float32"),
        "down": jax.ShapeDtypeStruct((overlapped, width), "float32"),
    }
    params = {"layers": [layer, layer]}
    rows = jax.ShapeDtypeStruct((rows, width), "float32")
    return {"params": params, "moments": params}, {"x": rows, "y": rows}


def test_small_parameters_and_a_large_batch_are_data_parallel():
    made = ps.plan(_train(_loss), *_arguments(1 << 16, 32, 64), mesh={"data": 8}, hardware="tpu-v5e")
    assert describe_axis(made, "data")[0] == "batch"
    assert "tensor parallel" not in str(made)


def test_parameters_that_are_stored_in_parts_for_a_large_batch_are_zero_3():
    arguments = _arguments(1 << 15, 2048, 8192)
    made = ps.plan(_train(_loss), *arguments, mesh={"data": 8}, hardware="tpu-v5e", constraints={"state/*": P("data", None)})
    assert describe_axis(made, "data")[:2] == ["batch", "ZeRO-3"]


def test_large_parameters_and_a_small_batch_are_tensor_parallel():
    made = ps.plan(_train(_loss), *_arguments(128, 4096, 16384), mesh={"model": 8}, hardware="tpu-v5e")
    assert describe_axis(made, "model")[0].startswith("tensor parallel")
    assert any(words.endswith("a layer") for words in describe_axis(made, "model"))
