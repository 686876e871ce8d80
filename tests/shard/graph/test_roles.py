"""The roles of inputs are inferred from what the step does with them."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.random import threefry_2x32
from jax.sharding import PartitionSpec as P
from tests.shard.steps import array, mlp, mlp_loss, mlp_step, rows, sgd

import penstock as ps


def plan_of(step, *args, **options):
    shapes = jax.eval_shape(lambda: args)
    return ps.plan(step, *shapes, **{"mesh": {"x": 8}, "hardware": "tpu-v5e", "check": False, **options})


def roles(plan):
    return {leaf.path: leaf.role for leaf in plan.inputs}


def adapted(w, a, batch):
    """Return the loss of a frozen model `w` with an embedding table and a low-rank adapter `a`."""
    hidden = w["embed"][batch["tokens"]]
    hidden = jax.nn.gelu(hidden @ w["up"] + (hidden @ a["in"]) @ a["out"]) @ w["down"]
    scores = jax.nn.log_softmax(hidden @ w["embed"].T)
    return -jnp.mean(jnp.take_along_axis(scores, batch["next"][..., None], axis=-1))


def adapter_step(a, w, batch):
    loss, gradients = jax.value_and_grad(lambda a: adapted(w, a, batch))(a)
    return sgd(a, gradients), loss


def adapter_args():
    tokens = jnp.zeros((64, 32), jnp.int32)
    frozen = {"embed": array(4096, 64), "up": array(64, 256), "down": array(256, 64)}
    return {"in": array(64, 4), "out": array(4, 256)}, frozen, {"tokens": tokens, "next": tokens}


def test_frozen_weights_and_tables_are_no_batch():
    plan = plan_of(adapter_step, *adapter_args())
    found = roles(plan)
    assert {path for path, role in found.items() if role == "batch"} == {"batch/tokens", "batch/next"}
    assert {found[f"w/{name}"] for name in ("embed", "up", "down")} == {"other"}
    assert {found["a/in"], found["a/out"]} == {"parameters"}


def test_data_parallelism_of_an_adapter_sends_its_gradients_alone():
    plan = plan_of(adapter_step, *adapter_args())
    adapter = 4 * (64 * 4 + 4 * 256)
    assert plan.baselines["data parallel"].bytes_on_wire < 3 * adapter


def test_frozen_weights_are_sharded_where_everything_is():
    plan = plan_of(adapter_step, *adapter_args())
    frozen = 4 * (4096 * 64 + 2 * 64 * 256)
    assert plan.baselines["FSDP"].memory.arguments < plan.baselines["data parallel"].memory.arguments - frozen // 2


@pytest.mark.parametrize("loss", [False, True], ids=["forward", "loss"])
def test_without_state_weights_are_no_batch(loss):
    def forward(params, x):
        hidden = jnp.tanh(x @ params["in"] + params["bias"])
        return jnp.mean((hidden @ params["out"]) ** 2) if loss else hidden @ params["out"]

    found = roles(plan_of(forward, mlp(), rows()["x"]))
    assert found["x"] == "batch"
    assert {found["params/in"], found["params/out"]} == {"other"}


def test_a_teacher_of_another_width_is_no_batch():
    def step(params, teacher, batch):
        def distance(params):
            return mlp_loss(params, batch) + mlp_loss(teacher, batch)

        return sgd(params, jax.grad(distance)(params))

    found = roles(plan_of(step, mlp(), mlp(16, 48), rows()))
    assert {found["teacher/in"], found["teacher/out"]} == {"other"}
    assert {found["batch/x"], found["batch/y"]} == {"batch"}


def test_weights_under_a_loop_over_layers_are_no_batch():
    def step(head, layers, x):
        def loss(head):
            hidden, _ = jax.lax.scan(lambda carry, w: (jnp.tanh(carry @ w), None), x, layers)
            return jnp.mean((hidden @ head) ** 2)

        return head - 0.1 * jax.grad(loss)(head), loss(head)

    assert roles(plan_of(step, array(32, 16), array(3, 32, 32), array(128, 32))) == {
        "head": "parameters",
        "layers": "other",
        "x": "batch",
    }


def test_images_and_labels_are_the_batch_and_frozen_kernels_are_not():
    def step(head, kernel, images, labels):
        def loss(head):
            features = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            scores = jax.nn.log_softmax(features.mean((1, 2)) @ head)
            return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], axis=1))

        return head - 0.1 * jax.grad(loss)(head), loss(head)

    args = array(16, 10), array(3, 3, 4, 16), array(32, 8, 8, 4), jnp.zeros(32, jnp.int32)
    assert roles(plan_of(step, *args)) == {"head": "parameters", "kernel": "other", "images": "batch", "labels": "batch"}


def noisy(key, batch):
    return {**batch, "y": batch["y"] + 0.1 * jax.random.normal(key, batch["y"].shape)}


def drop(key, batch):
    return {**batch, "x": batch["x"] * jax.random.bernoulli(key, 0.9, batch["x"].shape)}


def noisy_in_a_loop(keys, batch):
    return jax.lax.scan(lambda carry, key: (drop(key, noisy(key, carry)), None), batch, keys)[0]


def generated(key, batch):
    bits = threefry_2x32(key, jnp.arange(batch["y"].size, dtype=jnp.uint32)).reshape(batch["y"].shape)
    return {**batch, "y": batch["y"] + bits.astype(jnp.float32) * 1e-12}


KEYS = {
    "raw": (noisy, lambda: jax.random.PRNGKey(0)),
    "typed": (noisy, lambda: jax.random.key(0)),
    "split": (lambda key, batch: drop(jax.random.split(key)[1], batch), lambda: jax.random.PRNGKey(0)),
    "stacked": (lambda keys, batch: drop(keys[0], noisy(keys[1], batch)), lambda: jax.random.split(jax.random.PRNGKey(0), 16)),
    "scanned": (noisy_in_a_loop, lambda: jax.random.split(jax.random.PRNGKey(0), 8)),
    "generator": (generated, lambda: jax.random.PRNGKey(0)),
    "not read": (lambda key, batch: batch, lambda: jax.random.PRNGKey(0)),
    "not read by another generator": (lambda key, batch: batch, lambda: jax.random.PRNGKey(0, impl="rbg")),
    "another generator": (noisy, lambda: jax.random.PRNGKey(0, impl="rbg")),
}


@pytest.mark.parametrize("kind", KEYS)
def test_a_key_of_random_numbers_is_no_batch(kind):
    use, make = KEYS[kind]
    if kind == "another generator":
        jax.config.update("jax_default_prng_impl", "rbg")

    def step(params, batch, data):
        return mlp_step(params, use(data["any name"], batch))

    plan = plan_of(step, mlp(), rows(), {"any name": make()}, constraints={"batch/*": P("x")})
    assert roles(plan)["data/any name"] == "other"
    assert plan.batch_shardings == plan.shardings[1]


def test_a_key_that_is_returned_is_state_and_no_parameter():
    def step(state, batch):
        key, own = jax.random.split(state["key"])
        params, loss = mlp_step(state["params"], noisy(own, batch))
        return {"params": params, "key": key}, loss

    plan = plan_of(step, {"params": mlp(), "key": jax.random.PRNGKey(0)}, rows())
    assert roles(plan)["state/key"] == "other"
    assert [leaf.path for leaf in plan.inputs].index("state/key") in plan.state.values()


def test_unsigned_integers_that_are_data_are_a_batch():
    def step(table, tokens):
        return table - 0.1 * jax.grad(lambda table: jnp.sum(table[tokens[:, 0]] ** 2))(table)

    assert roles(plan_of(step, array(64, 16), jnp.ones((32, 2), jnp.uint32)))["tokens"] == "batch"


def test_a_role_that_the_user_gives_counts():
    plan = plan_of(mlp_step, mlp(), rows(), roles={"batch/y": "other"})
    assert (roles(plan)["batch/x"], roles(plan)["batch/y"]) == ("batch", "other")


# Parameters and the state of an optimizer


def momentum(params, gradients, state, rate=0.1):
    state = jax.tree.map(lambda m, g: 0.9 * m + g, state, gradients)
    return sgd(params, state, rate), state


def training(update, optimizer, loss=mlp_loss):
    """Return a step state → state, with `update(params, gradients, optimizer)`, and its state."""

    def step(state, batch):
        gradients = jax.grad(loss)(state["w"], batch)
        params, moments = update(state["w"], gradients, state["o"])
        return {"w": params, "o": moments}

    return step, {"w": mlp(), "o": optimizer}


def momentum_training(loss=mlp_loss):
    return training(momentum, mlp(), loss)


def factored():
    """Return a step whose optimizer keeps the means of squares over rows and columns, as Adafactor does."""

    def update(params, gradients, means):
        squares = {name: 0.9 * means[name] + jnp.mean(gradients["in"] ** 2, dim) for dim, name in enumerate(("columns", "rows"))}
        scale = jax.lax.rsqrt(squares["rows"][:, None] * squares["columns"] / squares["rows"].mean())
        return sgd(params, {**gradients, "in": gradients["in"] * scale}), squares

    return training(update, {"rows": array(16), "columns": array(32)})


def preconditioned():
    """Return a step whose optimizer multiplies gradients with matrices, as Shampoo does."""

    def update(params, gradients, left):
        left = left + gradients["in"] @ gradients["in"].T
        return sgd(params, {**gradients, "in": jnp.linalg.inv(left) @ gradients["in"]}), left

    return training(update, array(16, 16))


def limited():
    """Return a step that scales all updates by their norm."""

    def update(params, gradients, state):
        state = jax.tree.map(lambda m, g: 0.9 * m + g, state, gradients)
        norm = jnp.sqrt(sum(jnp.sum(m**2) for m in jax.tree.leaves(state)))
        return sgd(params, jax.tree.map(lambda m: m / norm, state)), state

    return training(update, mlp())


def averaged():
    inner, state = momentum_training()

    def step(state, batch):
        after = inner({"w": state["w"], "o": state["o"]}, batch)
        return {**after, "mean": jax.tree.map(lambda mean, w: 0.9 * mean + 0.1 * w, state["mean"], after["w"])}

    return step, {**state, "mean": mlp()}


def average_loss():
    inner, state = momentum_training()

    def step(state, batch):
        after = inner({"w": state["w"], "o": state["o"]}, batch)
        return {**after, "loss": 0.9 * state["loss"] + 0.1 * mlp_loss(state["w"], batch)}

    return step, {**state, "loss": jnp.zeros(())}


def losses_so_far():
    inner, state = momentum_training()

    def step(state, batch):
        after = inner({"w": state["w"], "o": state["o"]}, batch)
        return {**after, "losses": jnp.roll(state["losses"], 1).at[0].set(mlp_loss(after["w"], batch))}

    return step, {**state, "losses": jnp.zeros(100)}


def norm_of_updates():
    inner, state = momentum_training()

    def step(state, batch):
        after = inner(state, batch)
        return after, jnp.sqrt(sum(jnp.sum(m**2) for m in jax.tree.leaves(after["o"])))

    return step, state


def statistics():
    """Return a step with a batch normalisation, whose statistics are averaged."""

    def loss(w, batch):
        hidden = batch["x"] @ w["in"] + w["bias"]
        hidden = jax.nn.relu((hidden - hidden.mean(0)) / hidden.std(0))
        return jnp.mean((hidden @ w["out"] - batch["y"]) ** 2)

    inner, state = momentum_training(loss)

    def step(state, batch):
        mean = (batch["x"] @ state["w"]["in"]).mean(0)
        return {**inner({"w": state["w"], "o": state["o"]}, batch), "statistics": 0.9 * state["statistics"] + 0.1 * mean}

    return step, {**state, "statistics": array(32)}


def in_microbatches():
    inner, state = momentum_training()

    def step(state, batch):
        parts = jax.tree.map(lambda leaf: leaf.reshape(2, 8, 16), batch)
        return jax.lax.scan(lambda state, part: (inner(state, part), None), state, parts)[0]

    return step, state


def pooled():
    """Return a step whose head reads the mean over the rows."""

    def loss(w, batch):
        return jnp.mean((jax.nn.relu(batch["x"] @ w["in"] + w["bias"]).mean(0) @ w["out"] - batch["y"].mean(0)) ** 2)

    return momentum_training(loss)


@pytest.mark.parametrize(
    "make",
    [
        *(momentum_training, factored, preconditioned, limited, averaged, average_loss, losses_so_far, norm_of_updates),
        *(statistics, in_microbatches, pooled),
    ],
)
def test_state_that_only_the_update_reads_is_of_the_optimizer(make):
    step, state = make()
    found = roles(plan_of(step, state, rows()))
    assert {path for path, role in found.items() if role == "parameters"} == {"state/w/in", "state/w/bias", "state/w/out"}
    assert {role for path, role in found.items() if path.startswith("state/") and not path.startswith("state/w/")} == {
        "optimizer"
    }


@pytest.mark.filterwarnings("ignore:the batch of one row")
@pytest.mark.parametrize("count", [1, 16], ids=["one row", "rows"])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "lamb", "prodigy", "multisteps"])
def test_the_state_of_optax_is_of_the_optimizer(name, count):
    optax = pytest.importorskip("optax")
    make = {"prodigy": optax.contrib.prodigy, "multisteps": lambda rate: optax.MultiSteps(optax.adam(rate), 4)}
    optimizer = make[name](0.1) if name in make else getattr(optax, name)(0.1)

    def update(params, gradients, state):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    step, state = training(update, jax.eval_shape(optimizer.init, mlp()))
    found = roles(plan_of(step, state, rows(count)))
    assert {path for path, role in found.items() if role == "parameters"} == {"state/w/in", "state/w/bias", "state/w/out"}


def test_both_networks_and_the_target_that_the_forward_pass_reads_are_parameters():
    def step(state, batch):
        def loss(critic, actor):
            wanted = jax.lax.stop_gradient(jnp.tanh(batch["y"] @ state["target"]))
            return jnp.mean(((jnp.tanh(batch["x"] @ actor) @ critic) - wanted) ** 2)

        critic, critic_moments = momentum(state["critic"], jax.grad(loss)(state["critic"], state["actor"]), state["c"])
        actor, actor_moments = momentum(state["actor"], jax.grad(loss, 1)(critic, state["actor"]), state["a"])
        target = 0.9 * state["target"] + 0.1 * critic
        return {"critic": critic, "actor": actor, "target": target, "c": critic_moments, "a": actor_moments}

    names = ("critic", "actor", "target", "c", "a")
    found = roles(plan_of(step, {name: array(16, 16) for name in names}, rows()))
    assert {path for path, role in found.items() if role == "parameters"} == {"state/critic", "state/actor", "state/target"}


def test_without_a_batch_products_tell_parameters():
    inner, state = momentum_training()

    def step(state):
        key, own = jax.random.split(state["key"])
        noise = jax.random.normal(own, (16, 16))
        return {**inner({"w": state["w"], "o": state["o"]}, {"x": noise, "y": noise}), "key": key}

    found = roles(plan_of(step, {**state, "key": jax.random.PRNGKey(0)}))
    assert {path for path, role in found.items() if role == "parameters"} == {"state/w/in", "state/w/bias", "state/w/out"}
