"""Train a Flax Linen model with a TrainState by a plan, on 8 virtual CPU devices."""

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import penstock as ps

jax.config.update("jax_num_cpu_devices", 8)  # before JAX starts
model = nn.Sequential([nn.Dense(2048), nn.LayerNorm(), nn.relu, nn.Dropout(0.1, deterministic=False), nn.Dense(8)])


def create(key: jax.Array) -> TrainState:
    params = model.init({"params": key, "dropout": key}, np.ones((1, 64), np.float32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))


def step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, jax.Array]:
    def loss_of(params: dict) -> jax.Array:
        rngs = {"dropout": jax.random.fold_in(jax.random.key(1), state.step)}
        return optax.l2_loss(state.apply_fn({"params": params}, batch["x"], rngs=rngs), batch["y"]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


x = np.random.default_rng(0).normal(size=(4096, 64)).astype(np.float32)
loader = ps.Loader({"x": x, "y": np.abs(x[:, :8])}, batch_size=128, shuffle=True, epochs=2)
plan = ps.plan(step, jax.eval_shape(create, jax.random.key(0)), loader[0], hardware="tpu-v5e")  # allocates nothing
state, losses = plan.init(create, jax.random.key(0)), []  # each device creates its shards
train = plan.jit(step, donate_argnums=0)
with ps.feed(loader, to=plan) as batches:
    for batch in batches:
        state, loss = train(state, batch)
        losses.append(float(loss))
print(f"{plan}\nThe loss fell from {losses[0]:.3f} to {losses[-1]:.3f}.")
assert losses[-1] < losses[0] / 2
