"""Batches are told from frozen weights, biases and scales by how their dimensions are used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.shard.steps import array, mlp, mlp_loss, rows, sgd

import penstock as ps
from penstock.shard.graph.roles import infer_roles
from penstock.shard.graph.step_model import build_step_model
from penstock.shard.mesh.compiler_models import CPU
from penstock.shard.trace.step import trace


def batch_of(step, *args):
    """Return the paths of the inputs that are a batch."""
    traced = trace(step, args)
    roles = infer_roles(build_step_model(traced, {}, CPU), traced.state, traced.arguments)
    return {leaf.path for leaf, role in zip(traced.inputs, roles, strict=True) if role == "batch"}


def integers(*shape):
    return jnp.zeros(shape, jnp.int32)


def layer(width, out):
    return {"scale": array(width), "shift": array(width), "w": array(width, out), "b": array(out)}


def normalised(x, params):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * params["scale"] + params["shift"]


def layers_with_norms():
    def loss(layers, batch):
        hidden = batch["x"]
        for each in layers:
            hidden = jax.nn.gelu(normalised(hidden, each) @ each["w"] + each["b"])
        scores = jax.nn.log_softmax(hidden)[jnp.arange(64), batch["label"]]
        return -jnp.sum(scores * batch["weight"])

    batch = {"x": array(64, 48), "label": integers(64), "weight": array(64)}
    return loss, ([layer(48, 32), layer(32, 16), layer(16, 8)], batch)


def one_layer():
    return lambda params, batch: jnp.mean(jax.nn.relu(batch["x"] @ params["w"] + params["b"])), (
        {"w": array(48, 32), "b": array(32)},
        {"x": array(64, 48)},
    )


def one_row():
    loss, (params, _) = one_layer()
    return loss, (params, {"x": array(1, 48)})


def weights_that_are_transposed():
    def loss(layers, batch):
        hidden = batch["x"]
        for w, b in layers:
            hidden = jax.nn.relu(hidden @ w.T + b)
        return jnp.mean((hidden - batch["y"]) ** 2)

    return loss, ([(array(32, 48), array(32)), (array(8, 32), array(8))], {"x": array(64, 48), "y": array(64, 8)})


def convolutions_with_statistics():
    def loss(params, batch):
        dims = ("NHWC", "HWIO", "NHWC")
        hidden = jax.lax.conv_general_dilated(batch["x"], params["kernel"], (1, 1), "SAME", dimension_numbers=dims) + params["b"]
        hidden = (hidden - params["mean"]) * (params["scale"] * jax.lax.rsqrt(params["variance"] + 1e-5)) + params["shift"]
        scores = jax.nn.log_softmax(hidden.mean((1, 2)) @ params["out"])
        return -jnp.mean(jnp.take_along_axis(scores, batch["label"][:, None], axis=1))

    params = {name: array(16) for name in ("b", "mean", "variance", "scale", "shift")}
    params |= {"kernel": array(3, 3, 4, 16), "out": array(16, 8)}
    return loss, (params, {"x": array(32, 8, 8, 4), "label": integers(32)})


def scanned_layers_with_an_embedding():
    def loss(params, batch):
        def block(hidden, each):
            hidden = hidden + jax.nn.softmax(hidden @ hidden.mT) @ hidden
            return hidden + jax.nn.relu(normalised(hidden, each) @ each["w"] + each["b"]) @ each["out"], None

        hidden, _ = jax.lax.scan(block, params["table"][batch["tokens"]] + params["positions"], params["layers"])
        return -jnp.mean(jax.nn.log_softmax(hidden @ params["table"].T)[..., 0] * batch["mask"])

    layers = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), {**layer(16, 32), "out": array(32, 16)})
    params = {"table": array(64, 16), "positions": array(12, 16), "layers": layers}
    return loss, (params, {"tokens": integers(8, 12), "mask": array(8, 12)})


def experts():
    def loss(params, batch):
        gates = jax.nn.softmax(batch["x"] @ params["router"])
        hidden = jax.nn.relu(jnp.einsum("bd,edh->ebh", batch["x"], params["up"]) + params["b"][:, None])
        return jnp.mean(jnp.einsum("be,ebd->bd", gates, jnp.einsum("ebh,ehd->ebd", hidden, params["down"])))

    params = {"router": array(16, 8), "up": array(8, 16, 32), "b": array(8, 32), "down": array(8, 32, 16)}
    return loss, (params, {"x": array(64, 16)})


def one_dict():
    def loss(batch):
        hidden = jax.nn.relu(batch["x"] @ batch["frozen"] + batch["frozen bias"])
        return jnp.mean((hidden @ batch["frozen out"] - batch["y"]) ** 2)

    weights = {"frozen": array(32, 48), "frozen bias": array(48), "frozen out": array(48, 8)}
    return loss, ({"x": array(64, 32), "y": array(64, 8), **weights},)


def a_frozen_backbone():
    def step(head, frozen, batch):
        def loss(head):
            hidden = jax.nn.relu(batch["x"] @ frozen["in"] + frozen["bias"])
            hidden = jax.nn.relu(hidden @ frozen["out"] + frozen["last bias"])
            return jnp.mean((hidden @ head["w"] + head["b"] - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(head)
        return sgd(head, gradients), value

    frozen = {**mlp(64, 48), "last bias": array(64)}
    return step, ({"w": array(64, 8), "b": array(8)}, frozen, {"x": array(32, 64), "y": array(32, 8)})


def a_teacher():
    def step(params, teacher, batch):
        def loss(params):
            return mlp_loss(params, batch) + mlp_loss(teacher, batch)

        value, gradients = jax.value_and_grad(loss)(params)
        return sgd(params, gradients), value

    return step, (mlp(), mlp(16, 48), rows(64))


FROZEN = (
    layers_with_norms,
    one_layer,
    one_row,
    weights_that_are_transposed,
    convolutions_with_statistics,
    scanned_layers_with_an_embedding,
    experts,
    one_dict,
    a_frozen_backbone,
    a_teacher,
)


@pytest.mark.parametrize("make", FROZEN)
def test_frozen_weights_with_biases_scales_and_statistics_are_no_batch(make):
    step, args = make()
    *_, batch = args
    assert batch_of(step, *args) == {f"batch/{name}" for name in batch if "frozen" not in name}


def test_a_flax_module_in_evaluation_is_no_batch():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(32, 48, rngs=rngs)
            self.norms = nnx.List([nnx.BatchNorm(48, rngs=rngs), nnx.LayerNorm(48, rngs=rngs)])
            self.last = nnx.Linear(48, 4, rngs=rngs)

        def __call__(self, x):
            hidden = self.first(x)
            for norm in self.norms:
                hidden = norm(hidden)
            return self.last(jax.nn.relu(hidden))

    model = Model(nnx.Rngs(0))
    model.eval()
    batch = {"x": array(64, 32), "y": array(64, 4)}
    found = batch_of(lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2), model, batch)
    assert found == {"batch/x", "batch/y"}


def trained(loss):
    """Return a step that trains the first argument of a loss."""

    def step(params, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return sgd(params, gradients), value

    return step


def attention_over_the_first_dimension():
    """Return a step of batches whose first dimension is time, and of a mask that has the rows alone."""

    def loss(params, batch):
        hidden = batch["x"] @ params["in"]
        weights = jax.nn.softmax(jnp.einsum("tbd,sbd->bts", hidden, hidden))
        errors = jnp.einsum("bts,sbd->tbd", weights, hidden) @ params["out"] - batch["y"]
        return jnp.mean(jnp.mean(errors**2, -1) * batch["mask"])

    return trained(loss), mlp(), {"x": array(24, 16, 16), "y": array(24, 16, 16), "mask": array(16)}


def time_without_attention():
    def loss(params, batch):
        errors = jax.nn.relu(batch["x"] @ params["in"]) @ params["out"] - batch["y"]
        return jnp.mean(jnp.mean(errors**2, -1) * batch["mask"])

    return trained(loss), mlp(), {"x": array(24, 16, 16), "y": array(24, 16, 16), "mask": array(16)}


def a_recurrent_network():
    def loss(params, batch):
        hidden, _ = jax.lax.scan(lambda h, x: (jnp.tanh(x @ params["in"] + h @ params["own"]), None), batch["h"], batch["x"])
        return jnp.mean(jnp.mean(hidden**2, -1) * batch["mask"])

    batch = {"x": array(24, 8, 16), "h": array(8, 32), "mask": array(8)}
    return trained(loss), {"in": array(16, 32), "own": array(32, 32)}, batch


def graphs():
    """Return a step of nodes, edges and graphs, three batches of different sizes."""

    def loss(params, batch):
        hidden = batch["nodes"] @ params["in"]
        for _ in range(2):
            message = jax.nn.relu(hidden[batch["senders"]] @ params["message"] + batch["edges"] @ params["edge"])
            hidden = hidden + jax.ops.segment_sum(message, batch["receivers"], 48)
        hidden = hidden * batch["node mask"][:, None]
        pooled = jax.ops.segment_sum(hidden, batch["graph"], 8) + batch["globals"] @ params["global"]
        return jnp.mean(((pooled @ params["out"])[:, 0] - batch["y"]) ** 2 * batch["graph mask"])

    params = {"in": array(8, 16), "message": array(16, 16), "edge": array(4, 16), "global": array(3, 16), "out": array(16, 1)}
    nodes = {"nodes": array(48, 8), "node mask": array(48), "graph": integers(48)}
    edges = {"edges": array(128, 4), "senders": integers(128), "receivers": integers(128)}
    return trained(loss), params, nodes | edges | {"globals": array(8, 3), "y": array(8), "graph mask": array(8)}


def a_dense_graph():
    def loss(params, batch):
        hidden = batch["adjacency"].T @ jax.nn.relu(batch["x"] @ params["in"])
        errors = hidden @ params["out"] - batch["x"]
        return jnp.sum(errors**2 * batch["mask"][:, None])

    return trained(loss), mlp(), {"x": array(64, 16), "adjacency": array(64, 64), "mask": array(64)}


def two_towers():
    """Return a step of two batches that meet in one matrix of scores."""

    def loss(params, batch):
        image, text = (jax.nn.relu(batch[name] @ params[name]["in"]) @ params[name]["out"] for name in ("image", "text"))
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(image @ text.T)))

    params = {"image": {"in": array(64, 128), "out": array(128, 16)}, "text": {"in": array(24, 32), "out": array(32, 16)}}
    return trained(loss), params, {"image": array(64, 64), "text": array(64, 24)}


def weights_of_rows():
    """Return a step whose loss is a product with weights of the rows, which are therefore summed over at their first use."""

    def loss(params, batch):
        hidden = jax.nn.relu(batch["x"] @ params["in"] + params["bias"])
        return batch["weight"] @ jnp.mean((hidden @ params["out"] - batch["y"]) ** 2, -1)

    return trained(loss), mlp(), rows(64) | {"weight": array(64)}


BATCHES = (
    attention_over_the_first_dimension,
    time_without_attention,
    a_recurrent_network,
    graphs,
    a_dense_graph,
    two_towers,
    weights_of_rows,
)


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("make", BATCHES)
def test_all_leaves_of_a_batch_are_found(make, trains):
    step, params, batch = make()
    assert batch_of(step if trains else lambda params, batch: step(params, batch)[1], params, batch) == {
        f"batch/{name}" for name in batch
    }


def test_what_a_step_does_not_use_is_a_batch_beside_other_leaves_of_a_batch():
    def loss(state, batch):
        return mlp_loss(state["params"], batch)

    unused = {"labels": integers(16), "classes": array(8)}
    state = {"params": mlp(), "momentum": jax.tree.map(jnp.zeros_like, mlp())}
    assert batch_of(loss, state, rows(16) | unused) == {"batch/x", "batch/y", "batch/labels"}
    assert batch_of(lambda params, batch, labels: mlp_loss(params, batch), mlp(), rows(16), integers(16)) == {
        "batch/x",
        "batch/y",
        "labels",
    }


def forces(params, batch):
    """Return the loss of a force field, whose edges look up the positions of atoms."""

    def energy(positions):
        edges = positions[batch["senders"]] - positions[batch["receivers"]]
        messages = jax.nn.silu(edges @ params["w"]) @ params["u"]
        return jnp.sum(jnp.zeros((64, 8)).at[batch["receivers"]].add(messages) ** 2)

    return jnp.mean((jax.grad(energy)(batch["positions"]) - batch["forces"]) ** 2)


def test_positions_that_edges_look_up_are_a_batch_beside_other_leaves_of_as_many_rows():
    batch = {"positions": array(64, 3), "forces": array(64, 3), "senders": integers(192), "receivers": integers(192)}
    found = batch_of(trained(forces), {"w": array(3, 16), "u": array(16, 8)}, batch)
    assert found == {f"batch/{name}" for name in batch}


def test_a_frozen_table_is_no_batch_where_its_argument_has_no_other_leaf_of_as_many_rows():
    def step(params, frozen, batch):
        def loss(params):
            return jnp.mean((frozen["table"][batch["tokens"]] @ params["w"]) ** 2)

        return sgd(params, jax.grad(loss)(params))

    found = batch_of(step, {"w": array(16, 8)}, {"table": array(64, 16)}, {"tokens": integers(64)})
    assert found == {"batch/tokens"}


def test_what_is_the_same_for_all_rows_is_no_batch():
    def loss(params, batch):
        scores = jax.nn.log_softmax(batch["x"] @ params)
        return -jnp.mean(scores * batch["one-hot"] * batch["weight of each class"])

    batch = {"x": array(64, 32), "one-hot": array(64, 8), "weight of each class": array(8)}
    assert batch_of(trained(loss), array(32, 8), batch) == {"batch/x", "batch/one-hot"}


@pytest.mark.parametrize("make", [jax.random.PRNGKey, jax.random.key], ids=["raw", "typed"])
def test_a_key_for_each_row_is_a_batch(make):
    def loss(params, batch):
        x = jax.vmap(lambda key, x: x + jax.random.normal(key, x.shape))(batch["key"], batch["x"])
        return mlp_loss(params, batch | {"x": x})

    batch = rows(16) | {"key": jax.random.split(make(0), 16)}
    assert batch_of(trained(loss), mlp(), batch) == {"batch/x", "batch/y", "batch/key"}


def test_a_key_that_is_not_used_is_no_batch_even_of_two_rows():
    found = batch_of(lambda params, key, batch: mlp_loss(params, batch), mlp(), jax.random.PRNGKey(0), rows(2))
    assert found == {"batch/x", "batch/y"}


def test_a_feed_puts_batches_of_a_forward_step_in_the_layout_of_its_plan():
    step, (params, batch) = layers_with_norms()
    plan = ps.plan(step, params, batch, mesh={"x": 8}, hardware="tpu-v5e", check=False)
    with ps.feed([jax.tree.map(np.asarray, batch)], to=plan) as batches:
        (placed,) = batches
    assert jax.tree.map(lambda leaf: leaf.sharding, placed) == plan.shardings[1]
