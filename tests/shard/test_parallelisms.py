"""The search finds the known kinds of parallelism, although none of them is coded in it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from tests.shard.steps import sgd

import penstock as ps

planned = functools.partial(ps.plan, hardware="tpu-v5e", check=False)


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def training(loss):
    """Return a training step with momentum, for a loss of (params, batch)."""

    def step(params, momentum, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return sgd(params, momentum), momentum, value

    return step


def layouts(plan):
    return {leaf.path: leaf.partition_spec for leaf in plan.inputs}


def used(plan):
    return {leaf.path: leaf.used for leaf in plan.inputs}


def mlp_loss(params, batch):
    return jnp.mean((jax.nn.relu(batch @ params["up"]) @ params["down"]) ** 2)


def mlp(width, hidden):
    return {"up": shape(width, hidden), "down": shape(hidden, width)}


def test_a_small_convolutional_net_is_data_parallel():
    def loss(params, batch):
        hidden = batch["x"]
        for kernel in params["kernels"]:
            hidden = jax.nn.relu(
                lax.conv_general_dilated(hidden, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            )
        logits = hidden.mean((1, 2)) @ params["out"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], axis=1))

    params = {"kernels": [shape(3, 3, 3, 64), shape(3, 3, 64, 128)], "out": shape(128, 16)}
    batch = {"x": shape(512, 64, 64, 3), "label": shape(512, dtype=jnp.int32)}
    plan = planned(training(loss), params, params, batch, mesh={"data": 8})
    assert layouts(plan)["batch/x"] == P("data", None, None, None)
    # The few weights may be stored sharded, but every device computes with all of them.
    assert not any(any(used(plan)[f"params/kernels/{n}"]) for n in range(2))
    assert plan.axis_work["data"]["batch"] > 0.9


def test_large_weights_with_a_small_batch_are_sharded_by_column_and_then_by_row():
    plan = planned(training(mlp_loss), *(mlp(8192, 32768),) * 2, shape(16, 8192), mesh={"model": 8}, memory="4GiB")
    assert used(plan)["params/up"] == ((), ("model",))
    assert used(plan)["params/down"] == (("model",), ())
    assert layouts(plan)["params/up"] == layouts(plan)["momentum/up"] == P(None, "model")
    assert layouts(plan)["params/down"] == layouts(plan)["momentum/down"] == P("model", None)


def test_with_a_large_batch_and_little_memory_weights_are_sharded_and_gathered_for_use():
    params = {f"layer{n}": mlp(4096, 16384) for n in range(4)}

    def loss(params, batch):
        for layer in params.values():
            batch = batch + jax.checkpoint(lambda w, x: jax.nn.relu(x @ w["up"]) @ w["down"])(layer, batch)
        return jnp.mean(batch**2)

    whole = 2 * 4 * 2 * 4096 * 16384 * 4
    batch = shape(8 * 8192, 4096)
    free = planned(training(loss), params, params, batch, mesh={"data": 8}, memory="1TB")
    limit = int(0.5 * free.baselines["data parallel"].memory.total)
    plan = planned(training(loss), params, params, batch, mesh={"data": 8}, memory=limit)
    assert layouts(plan)["batch"] == P("data", None)
    assert plan.cost.memory.parameters + plan.cost.memory.optimizer <= 0.6 * whole
    assert any("data" in (axis for entry in leaf.stored for axis in entry) for leaf in plan.inputs if leaf.role == "optimizer")
    assert plan.axis_work["data"]["batch"] > 0.7


def test_a_large_table_is_sharded():
    def loss(params, batch):
        return jnp.mean((params["table"][batch["ids"]] @ params["out"]) ** 2)

    params = {"table": shape(8_000_000, 128), "out": shape(128, 128)}
    plan = planned(training(loss), params, params, {"ids": shape(4096, dtype=jnp.int32)}, mesh={"model": 8}, memory="4GiB")
    assert layouts(plan)["params/table"] == layouts(plan)["momentum/table"]
    assert layouts(plan)["params/table"] in (P("model", None), P(None, "model"))
    assert plan.cost.bytes_on_wire < 100 * 2**20  # never the table itself, which has 4 GB


def test_the_weights_of_experts_are_sharded_by_expert():
    def loss(params, batch):
        gates = jax.nn.softmax(batch @ params["router"])
        hidden = jax.nn.relu(jnp.einsum("bd,edh->ebh", batch, params["up"]))
        return jnp.mean(jnp.einsum("be,ebh,ehd->bd", gates, hidden, params["down"]) ** 2)

    params = {"router": shape(2048, 64), "up": shape(64, 2048, 4096), "down": shape(64, 4096, 2048)}
    plan = planned(training(loss), params, params, shape(64, 2048), mesh={"expert": 8}, memory="4GiB")
    assert layouts(plan)["params/up"] == P("expert", None, None)
    assert layouts(plan)["params/down"] == P("expert", None, None)


@pytest.mark.parametrize(("population", "rows", "width"), [(64, 128, 512), (128, 16, 384)])
def test_the_noise_of_an_evolution_strategy_is_shared_out(population, rows, width):
    """No input has the dimension of the population, so data parallelism makes all noise on each device."""

    def step(weights, key, batch):
        noise = jax.vmap(lambda key: jax.random.normal(key, weights.shape))(jax.random.split(key, population))
        losses = jax.vmap(lambda each: jnp.mean((batch @ (weights + 0.1 * each)) ** 2))(noise)
        return weights - jnp.tensordot(losses, noise, 1) / population, losses.mean()

    key = jax.eval_shape(lambda: jax.random.key(0))
    plan = planned(step, shape(256, width), key, shape(rows, 256), mesh={"data": 8})
    made, shared = (each.verify().measured.flops for each in (plan.alternatives["data parallel"], plan))
    assert shared < made / 4


def test_a_plan_is_never_slower_than_a_baseline_that_fits():
    for width, rows in ((256, 8192), (4096, 64), (1024, 1024)):
        plan = planned(training(mlp_loss), *(mlp(width, 4 * width),) * 2, shape(rows, width), mesh={"data": 2, "model": 4})
        for known in plan.baselines.values():
            if known.memory.total <= plan.limit:
                assert plan.cost.seconds <= known.seconds * 1.03


@pytest.mark.parametrize("pin", [P(), P("data"), P(None, "model"), P(("model", "data")), P("model", "data")], ids=str)
def test_a_constraint_of_the_user_is_kept(pin):
    plan = planned(
        training(mlp_loss),
        *(mlp(64, 256),) * 2,
        shape(128, 64),
        mesh={"data": 2, "model": 4},
        constraints={"params/up": pin},
    )
    (leaf,) = (leaf for leaf in plan.inputs if leaf.path == "params/up")
    wanted = tuple((entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in (*pin, None, None)[:2])
    assert leaf.stored == wanted
