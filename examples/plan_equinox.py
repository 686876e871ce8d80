"""Train an Equinox model with Optax by a plan, on 8 virtual CPU devices. Functions and numbers in the model are static."""

import equinox as eqx
import jax
import numpy as np
import optax

import penstock as ps

jax.config.update("jax_num_cpu_devices", 8)  # before JAX starts
optimizer = optax.adam(1e-3)


def create(key: jax.Array) -> tuple[eqx.nn.MLP, optax.OptState]:
    model = eqx.nn.MLP(64, 8, 2048, depth=1, key=key)
    return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))


def step(model: eqx.nn.MLP, moments: optax.OptState, key: jax.Array, batch: dict[str, jax.Array]) -> tuple:
    def loss_of(model: eqx.nn.MLP) -> jax.Array:
        return optax.l2_loss(jax.vmap(model)(eqx.nn.Dropout(0.1)(batch["x"], key=now)), batch["y"]).mean()

    key, now = jax.random.split(key)
    loss, gradients = eqx.filter_value_and_grad(loss_of)(model)
    updates, moments = optimizer.update(gradients, moments)
    return eqx.apply_updates(model, updates), moments, key, loss


x = np.random.default_rng(0).normal(size=(4096, 64)).astype(np.float32)
loader = ps.Loader({"x": x, "y": np.abs(x[:, :8])}, batch_size=128, shuffle=True, epochs=2)
key = jax.random.key(0)
plan = ps.plan(step, *eqx.filter_eval_shape(create, key), key, loader[0], hardware="tpu-v5e")  # allocates nothing
model, moments = plan.init(create, key)  # each device creates its shards
train, losses = plan.jit(step, donate_argnums=(0, 1)), []
with ps.feed(loader, to=plan) as batches:
    for batch in batches:
        model, moments, key, loss = train(model, moments, key, batch)
        losses.append(float(loss))
print(f"{plan}\nThe loss fell from {losses[0]:.3f} to {losses[-1]:.3f}.")
assert losses[-1] < losses[0] / 2
