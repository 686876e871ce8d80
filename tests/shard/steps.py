"""Steps of all forms, with a few hundred parameters. Each function returns (step, state, batch).

`step(*state, batch)` returns the new state and a loss.
"""

import collections
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from penstock.shard import find_hardware

# The speed of a TPU, with the memory that the CPU compiler needs: tests compile for CPUs.
V5E_ON_CPU = replace(find_hardware("tpu-v5e"), platform="cpu")


def array(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape) * 0.3, dtype)


def sgd(params, gradients, rate=0.1):
    return jax.tree.map(lambda p, g: p - (rate * g).astype(p.dtype), params, gradients)


def mlp(width=16, hidden=32):
    return {"in": array(width, hidden, seed=1), "bias": array(hidden, seed=2), "out": array(hidden, width, seed=3)}


def mlp_loss(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


def mlp_step(params, batch):
    loss, gradients = jax.value_and_grad(mlp_loss)(params, batch)
    return sgd(params, gradients), loss


def rows(count=16, width=16):
    return {"x": array(count, width, seed=4), "y": array(count, width, seed=5)}


def plain():
    return mlp_step, (mlp(),), rows()


def in_parts():
    """Return a step (params, optimizer, batch) → (params, optimizer, loss), with momentum and a step counter."""

    def step(params, optimizer, batch):
        loss, gradients = jax.value_and_grad(mlp_loss)(params, batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, optimizer["momentum"], gradients)
        return sgd(params, momentum), {"momentum": momentum, "count": optimizer["count"] + 1}, loss

    params = mlp()
    return step, (params, {"momentum": jax.tree.map(jnp.zeros_like, params), "count": jnp.int32(0)}), rows()


def odd_state():
    """Return a step with None, empty containers and named tuples in the state."""
    Optimizer = collections.namedtuple("Optimizer", ["count", "momentum", "nothing"])

    def step(state, batch):
        loss, gradients = jax.value_and_grad(mlp_loss)(state["params"], batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["opt"].momentum, gradients)
        opt = Optimizer(state["opt"].count + 1, momentum, None)
        return {"params": sgd(state["params"], momentum), "opt": opt, "empty": (), "none": None, "more": {}}, loss

    params = mlp()
    opt = Optimizer(jnp.int32(0), jax.tree.map(jnp.zeros_like, params), None)
    return step, ({"params": params, "opt": opt, "empty": (), "none": None, "more": {}},), rows()


def scanned_layers():
    """Return a step with a scan over layers, with `jax.checkpoint`."""

    def step(params, batch):
        def loss(params):
            layer = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w["a"]) @ w["b"], None))
            hidden, _ = lax.scan(layer, batch["x"], params)
            return jnp.mean((hidden - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return sgd(params, gradients), value

    return step, ({"a": array(3, 16, 32, seed=1), "b": array(3, 32, 16, seed=2)},), rows()


def scan_that_collects():
    """Return a step with scans that stack results, in reverse and unrolled, and one that swaps its carries."""

    def step(params, batch):
        def loss(w):
            (a, b), stacked = lax.scan(
                lambda carry, x: ((carry[1], jnp.tanh(carry[0] @ w + x)), carry[0]),
                (batch["x"], batch["y"]),
                jnp.stack([batch["y"]] * 4),
                reverse=True,
                unroll=2,
            )
            return jnp.mean(a * b) + jnp.mean(stacked**2)

        value, gradient = jax.value_and_grad(loss)(params)
        return params - 0.1 * gradient, value

    return step, (array(16, 16, seed=1),), rows()


def while_loop():
    """Return a step with a `while` whose trip count depends on the data."""

    def step(params, batch):
        def body(carry):
            turn, hidden = carry
            return turn + 1, jnp.tanh(hidden @ params)

        turns, hidden = lax.while_loop(lambda carry: (carry[0] < 3) & (jnp.sum(carry[1] ** 2) < 1e6), body, (0, batch["x"]))
        return params - 1e-2 * (hidden.T @ batch["y"]), jnp.mean(hidden**2) + turns

    return step, (array(16, 16, seed=1),), rows()


def fori_loop():
    def step(params, batch):
        def loss(w):
            return jnp.mean((lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w) * (i + 1), batch["x"]) - batch["y"]) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        return params - 0.1 * gradient, value

    return step, (array(16, 16, seed=1),), rows()


def choices():
    """Return a step with `cond` and `switch`, on the data and on the step counter."""

    def step(params, count, batch):
        def loss(w):
            hidden = lax.cond(jnp.sum(batch["x"]) > 0, lambda x: x @ w["in"], lambda x: jnp.sin(x) @ w["in"], batch["x"])
            ways = (lambda h: h @ w["out"], lambda h: jnp.tanh(h) @ w["out"], lambda h: h[:, :16] * 2.0)
            return jnp.mean((lax.switch(count % 3, ways, hidden) - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return sgd(params, gradients), count + 1, value

    return step, (mlp(), jnp.int32(0)), rows()


def custom_derivatives():
    """Return a step with `custom_jvp` (relu and logsumexp) and a `custom_vjp`."""

    @jax.custom_vjp
    def half_gradient(x):
        return x * 1.0

    half_gradient.defvjp(lambda x: (x * 1.0, None), lambda _, g: (g * 0.5,))

    def step(params, batch):
        def loss(params):
            hidden = jax.nn.silu(jax.nn.relu(batch["x"] @ params["in"] + params["bias"]))
            logits = half_gradient(hidden) @ params["out"]
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.max(logits, axis=-1)) + jnp.mean(jax.nn.gelu(logits))

        value, gradients = jax.value_and_grad(loss)(params)
        return sgd(params, gradients), value

    return step, (mlp(),), rows()


def custom_derivatives_forward():
    """Return a step with a `custom_vjp` and a `custom_jvp` that are not differentiated, and one around a loop."""

    @jax.custom_vjp
    def twice(x):
        return lax.scan(lambda c, _: (jnp.tanh(c), None), x, None, length=2)[0]

    twice.defvjp(lambda x: (twice(x), None), lambda _, g: (g,))

    def step(params, batch):
        hidden = jax.nn.relu(twice(batch["x"]) @ params)
        return params * 0.9, jnp.mean(jax.nn.logsumexp(hidden, axis=0))

    return step, (array(16, 16, seed=1),), rows()


def nested_jit():
    @jax.jit
    def inner(x, w):
        return jax.jit(jnp.tanh)(x @ w)

    def step(params, batch):
        def loss(w):
            return jnp.mean((inner(inner(batch["x"], w), w) - batch["y"]) ** 2)

        value, gradient = jax.jit(jax.value_and_grad(loss))(params)
        return params - 0.1 * gradient, value

    return jax.jit(step), (array(16, 16, seed=1),), rows()


def random_keys():
    """Return a step with dropout, and a typed and a raw random key in the state."""

    def step(params, keys, batch):
        now, after = jax.random.split(keys["typed"])
        raw, raw_after = jax.random.split(keys["raw"])

        def loss(params):
            kept = jax.random.bernoulli(now, 0.8, batch["x"].shape)
            noise = jax.random.normal(raw, batch["y"].shape) * 0.1
            return mlp_loss(params, {"x": jnp.where(kept, batch["x"], 0.0), "y": batch["y"] + noise})

        value, gradients = jax.value_and_grad(loss)(params)
        return sgd(params, gradients), {"typed": after, "raw": raw_after}, value

    return step, (mlp(), {"typed": jax.random.key(0), "raw": jax.random.PRNGKey(1)}), rows()


def tied_embeddings():
    def step(params, batch):
        def loss(params):
            hidden = params["table"][batch["tokens"]]
            logits = jax.nn.relu(hidden @ params["w"]) @ params["table"].T
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["next"][..., None], axis=-1)
            return -jnp.mean(jnp.where(batch["mask"][..., None], chosen, 0.0))

        value, gradients = jax.value_and_grad(loss)(params)
        return sgd(params, gradients), value

    tokens = np.random.default_rng(0).integers(0, 32, (8, 9))
    batch = {"tokens": jnp.asarray(tokens[:, :-1]), "next": jnp.asarray(tokens[:, 1:]), "mask": jnp.asarray(tokens[:, 1:] > 3)}
    return step, ({"table": array(32, 16, seed=1), "w": array(16, 16, seed=2)},), batch


def attention():
    def step(params, batch):
        def loss(params):
            q, k, v = (jnp.einsum("btd,dhk->bthk", batch["x"], params[name]) for name in "qkv")
            weights = jax.nn.softmax(jnp.einsum("bqhk,bthk->bhqt", q, k), where=jnp.tril(jnp.ones((8, 8), bool)))
            mixed = jnp.einsum("bhqt,bthk->bqhk", weights, v)
            hidden = batch["x"] + jnp.einsum("bqhk,hkd->bqd", mixed, params["o"])
            hidden = (hidden - hidden.mean(-1, keepdims=True)) * lax.rsqrt(hidden.var(-1, keepdims=True) + 1e-5)
            return jnp.mean((hidden - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return sgd(params, gradients), value

    params = {name: array(16, 4, 4, seed=number) for number, name in enumerate("qkv")} | {"o": array(4, 4, 16, seed=9)}
    return step, (params,), {"x": array(8, 8, 16, seed=4), "y": array(8, 8, 16, seed=5)}


def convolutions():
    def step(params, batch):
        def loss(params):
            hidden = batch["x"]
            for kernel in params["kernels"]:
                hidden = jax.nn.relu(
                    lax.conv_general_dilated(hidden, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
                )
                hidden = lax.reduce_window(hidden, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            logits = hidden.mean((1, 2)) @ params["out"]
            return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(16), batch["label"]])

        value, gradients = jax.value_and_grad(loss)(params)
        return sgd(params, gradients), value

    params = {"kernels": [array(3, 3, 2, 8, seed=1), array(3, 3, 8, 16, seed=2)], "out": array(16, 8, seed=3)}
    return step, (params,), {"x": array(16, 8, 8, 2), "label": jnp.arange(16) % 8}


def closed_over():
    """Return a step that closes over constants: NumPy and JAX arrays, and a scalar."""
    table, scale, shift = np.asarray(array(16, 32, seed=7)), array(32, seed=8), 0.5

    def step(params, batch):
        def loss(w):
            return jnp.mean(((batch["x"] @ table) * scale @ w + shift - batch["y"]) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        return params - 0.1 * gradient, value

    return step, (array(32, 16, seed=1),), rows()


def odd_leaves():
    """Return a step with Python and NumPy scalars, booleans, empty arrays, and an unused leaf."""

    def step(state, batch):
        loss, gradients = jax.value_and_grad(mlp_loss)(state["params"], batch)
        rate = jnp.where(state["flag"], state["rate"], 0.0) * batch["weight"]
        new = jax.tree.map(lambda p, g: p - rate * g, state["params"], gradients)
        return {**state, "params": new, "none": state["none"] * 2}, loss + jnp.sum(batch["nothing"])

    state = {
        "params": mlp(),
        "rate": jnp.float32(0.1),
        "flag": jnp.bool_(True),
        "none": jnp.zeros((0, 16)),
        "frozen": array(16, 16),
    }
    return step, (state,), rows() | {"weight": np.float32(1.0), "nothing": jnp.zeros((16, 0)), "unread": jnp.arange(16)}


def prime_sizes():
    """Return a step whose dimensions are all prime, so that nothing divides."""
    return mlp_step, (mlp(13, 31),), rows(7, 13)


def batch_does_not_divide():
    return mlp_step, (mlp(),), rows(12)


def experts():
    """Return a step with a dense mixture of experts."""

    def step(params, batch):
        def loss(params):
            gates = jax.nn.softmax(batch["x"] @ params["router"])
            hidden = jax.nn.relu(jnp.einsum("bd,edh->ebh", batch["x"], params["up"]))
            made = jnp.einsum("ebh,ehd->ebd", hidden, params["down"])
            return jnp.mean((jnp.einsum("be,ebd->bd", gates, made) - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return sgd(params, gradients), value

    params = {"router": array(16, 8, seed=1), "up": array(8, 16, 32, seed=2), "down": array(8, 32, 16, seed=3)}
    return step, (params,), rows()


def indexing():
    """Return a step with slices, updates in place, sorting, cumulative sums, padding and concatenation."""

    def step(params, batch):
        def loss(w):
            hidden = batch["x"] @ w
            hidden = hidden.at[:, 2].add(1.0).at[3:5].multiply(0.5)
            hidden = jnp.concatenate([hidden[:, 8:], hidden[:, :8]], axis=1)
            hidden = jnp.cumsum(jnp.pad(hidden, ((0, 0), (1, 1)))[:, 1:-1], axis=1) + jnp.sort(hidden, axis=0)
            hidden = lax.dynamic_update_slice(hidden, hidden[:4] * 2, (4, 0)) + jnp.roll(hidden, 3, axis=0)
            top, _ = lax.top_k(hidden, 4)
            return jnp.mean((hidden - batch["y"]) ** 2) + jnp.mean(top) + jnp.mean(hidden.reshape(4, 4, 16)[:, ::-1])

        value, gradient = jax.value_and_grad(loss)(params)
        return params - 0.01 * gradient, value

    return step, (array(16, 16, seed=1),), rows()


def symmetric():
    """Return a step with x + x.T, whose dimensions contradict each other."""

    def step(params, batch):
        def loss(w):
            both = w + w.T
            return jnp.mean((batch["x"] @ both @ (w * w.T) - batch["y"]) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        return params - 0.1 * gradient, value

    return step, (array(16, 16, seed=1),), rows()


STEPS = (
    plain,
    in_parts,
    odd_state,
    scanned_layers,
    scan_that_collects,
    while_loop,
    fori_loop,
    choices,
    custom_derivatives,
    custom_derivatives_forward,
    nested_jit,
    random_keys,
    tied_embeddings,
    attention,
    convolutions,
    closed_over,
    odd_leaves,
    prime_sizes,
    batch_does_not_divide,
    experts,
    indexing,
    symmetric,
)
