"""Train a model that does not fit: see what would make it fit, take the best, and train. Runs on 8 virtual CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np

import penstock as ps

jax.config.update("jax_num_cpu_devices", 8)  # before JAX starts
LAYERS, WIDTH, ROWS = 12, 256, 4096
MEMORY = "24MiB"


def create(key: jax.Array) -> dict[str, jax.Array]:
    up, down, out = (jax.random.normal(each, (LAYERS, WIDTH, WIDTH)) / 16 for each in jax.random.split(key, 3))
    return {"up": up, "down": 0.1 * down, "out": out[0, :, :8]}


def step(params: dict, batch: dict[str, jax.Array]) -> tuple[dict, jax.Array]:
    def loss_of(params: dict) -> jax.Array:
        def layer(x: jax.Array, weights: tuple) -> tuple[jax.Array, None]:
            up, down = weights
            return x + jax.nn.gelu(x @ up) @ down, None

        x, _ = jax.lax.scan(layer, batch["x"], (params["up"], params["down"]))
        return jnp.mean((x @ params["out"] - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), loss


x = np.random.default_rng(0).normal(size=(2 * ROWS, WIDTH)).astype(np.float32)
loader = ps.Loader({"x": x, "y": np.abs(x[:, :8])}, batch_size=ROWS, epochs=5)
arguments = (step, jax.eval_shape(create, jax.random.key(0)), loader[0])
try:
    ps.plan(*arguments, mesh={"data": 8}, memory=MEMORY)
except ps.PlanError as error:
    print(error)
    options = error.options
plan = options['remat="auto"']
print(plan)
params, losses = plan.init(create, jax.random.key(0)), []
train = plan.jit(step, donate_argnums=0)
with ps.feed(loader, to=plan) as batches:
    for batch in batches:
        params, loss = train(params, batch)
        losses.append(float(loss))
print(f"The loss fell from {losses[0]:.3f} to {losses[-1]:.3f}.")
sizes = ps.largest_batch(*arguments, mesh={"data": 8}, memory=MEMORY, remat="auto")
print(sizes)
assert losses[-1] < losses[0]
assert sizes.largest.rows >= ROWS
