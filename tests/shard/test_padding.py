"""A plan for TPUs is near its limit if it may exceed it once short rows are padded to the lanes of a tile."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.extras import require

import penstock as ps
from penstock.shard.hlo.topologies import describe_missing_compiler, find_topology

planned = functools.partial(ps.plan, mesh={"x": 8}, hardware="tpu-v5e", check=False)


def shape(*sizes, dtype=np.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def training(loss):
    return lambda params, batch: jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, batch))


def embedding(width):
    def loss(params, batch):
        return jnp.mean(jnp.tanh(params["table"][batch["tokens"]].sum(1) @ params["out"]) ** 2)

    return loss, {"table": shape(4_000_000, width), "out": shape(width, 512)}, {"tokens": shape(32768, 4, dtype=np.int32)}


def graph(width):
    def loss(params, batch):
        sent = jnp.tanh(batch["x"] @ params["in"])[batch["senders"]]
        return jnp.mean(jax.ops.segment_sum(jnp.tanh(sent @ params["edge"]), batch["receivers"], len(batch["x"])) ** 2)

    edges = shape(4 << 20, dtype=np.int32)
    params = {"in": shape(width, width), "edge": shape(width, width)}
    return loss, params, {"x": shape(1 << 20, width), "senders": edges, "receivers": edges}


def images(width):
    def loss(params, batch):
        form = ("NHWC", "HWIO", "NHWC")
        hidden = jax.nn.relu(jax.lax.conv_general_dilated(batch, params[0], (1, 1), "SAME", dimension_numbers=form))
        return jnp.mean(jax.lax.conv_general_dilated(hidden, params[1], (1, 1), "SAME", dimension_numbers=form) ** 2)

    return loss, [shape(3, 3, 3, width), shape(3, 3, width, width)], shape(256, 128, 128, 3)


def in_order(width):
    def loss(params, batch):
        return jnp.mean(jnp.sort(jnp.tanh(batch @ params), axis=0) ** 2)

    return loss, shape(width, width), shape(8 << 20, width)


def products(width):
    def loss(params, batch):
        return jnp.mean(jnp.tanh(jnp.tanh(batch @ params[0]) @ params[1]) ** 2)

    return loss, [shape(width, width)] * 2, shape(1 << 20, width)


def plan_of(make, width, **options):
    loss, *args = make(width)
    return planned(training(loss), *args, **options)


@pytest.mark.parametrize(("make", "width"), [(embedding, 64), (embedding, 32), (graph, 32), (images, 16), (in_order, 16)])
def test_short_rows_of_lookups_sorts_and_convolutions_may_be_padded(make, width):
    predicted = plan_of(make, width).cost.memory.total
    plan = plan_of(make, width, memory=2 * predicted)
    assert plan.padded > 1.2 * predicted
    assert plan.near_limit
    assert plan.unchecked
    assert "if a TPU pads arrays of short rows" in str(plan).replace("\n  ", " ")


@pytest.mark.parametrize(
    ("make", "width", "options"),
    [
        (embedding, 128, {"mesh": {"x": 1}}),
        (products, 16, {}),
        (embedding, 64, {"hardware": "a100"}),
        (images, 16, {"hardware": "a100"}),
    ],
)
def test_long_rows_products_and_gpus_pad_nothing(make, width, options):
    predicted = plan_of(make, width, **options).cost.memory.total
    plan = plan_of(make, width, memory=2 * predicted, **options)
    assert plan.padded == plan.cost.memory.total
    assert not plan.near_limit


def test_the_warning_says_what_padding_may_take():
    predicted = plan_of(embedding, 64).cost.memory.total
    if not describe_missing_compiler(find_topology("v5e:2x4")):
        pytest.skip("a TPU compiler is here, which decides")
    with pytest.warns(UserWarning, match="or up to .* if a TPU pads arrays of short rows"):
        plan_of(embedding, 64, memory=2 * predicted, check=None)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "width"), [(embedding, 64), (embedding, 16), (graph, 32), (images, 16)])
def test_the_compiler_needs_less_than_the_band_allows(make, width):
    require("libtpu")
    plan = plan_of(make, width)
    assert plan.verify("v5e:2x4").measured.memory < plan.padded / 0.6
