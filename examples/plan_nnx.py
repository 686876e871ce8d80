"""Train a Flax NNX model by a plan, on 8 virtual CPU devices. The step changes the model and the optimizer: both are state."""

import jax
import numpy as np
import optax
from flax import nnx

import penstock as ps

jax.config.update("jax_num_cpu_devices", 8)  # before JAX starts


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.norm = nnx.Linear(64, 2048, rngs=rngs), nnx.BatchNorm(2048, rngs=rngs)
        self.drop, self.down = nnx.Dropout(0.1, rngs=rngs), nnx.Linear(2048, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.drop(nnx.relu(self.norm(self.up(x)))))  # changes running means, and the random stream of dropout


def create() -> tuple[Model, nnx.Optimizer]:
    return (model := Model(nnx.Rngs(0))), nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def step(model: Model, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
    loss, gradients = nnx.value_and_grad(lambda model: optax.l2_loss(model(batch["x"]), batch["y"]).mean())(model)
    optimizer.update(model, gradients)
    return loss


x = np.random.default_rng(0).normal(size=(4096, 64)).astype(np.float32)
loader = ps.Loader({"x": x, "y": np.abs(x[:, :8])}, batch_size=128, shuffle=True, epochs=2)
plan = ps.plan(step, *nnx.eval_shape(create), loader[0], hardware="tpu-v5e")  # allocates nothing
model, optimizer = plan.init(create)  # each device creates its shards
train = plan.jit(step, donate_argnums=(0, 1))
with ps.feed(loader, to=plan) as batches:
    losses = [float(train(model, optimizer, batch)) for batch in batches]
print(f"{plan}\nThe loss fell from {losses[0]:.3f} to {losses[-1]:.3f}.")
assert losses[-1] < losses[0] / 2
