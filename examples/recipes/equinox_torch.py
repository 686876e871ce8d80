"""Train Equinox with a torch DataLoader. To resume the run bit for bit, give its Dataset to a penstock Loader instead.

pip install "penstock[torch]" equinox optax && python equinox_torch.py
"""

import json

import equinox as eqx
import jax
import numpy as np
import optax
from torch.utils.data import DataLoader, Dataset

import penstock as ps


class Spirals(Dataset):
    """Points of two spirals, to be told apart."""

    def __len__(self) -> int:
        return 4_096

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        radius, label = 0.2 + np.random.default_rng(index).random(), index % 2
        angle = 3 * radius + np.pi * label
        return np.array([radius * np.cos(angle), radius * np.sin(angle)], np.float32), label


cross_entropy, optimizer = optax.softmax_cross_entropy_with_integer_labels, optax.adam(0.003)


@eqx.filter_jit
def step(model: eqx.Module, moments: optax.OptState, batch: tuple) -> tuple[eqx.Module, optax.OptState, jax.Array]:
    loss, gradients = eqx.filter_value_and_grad(lambda model: cross_entropy(jax.vmap(model)(batch[0]), batch[1]).mean())(model)
    updates, moments = optimizer.update(gradients, moments)
    return eqx.apply_updates(model, updates), moments, loss


def train(batches: ps.Feed, steps: int, model: eqx.Module, moments: optax.OptState) -> tuple:
    for _, batch in zip(range(steps), batches, strict=False):
        model, moments, loss = step(model, moments, batch)
    return model, moments, float(loss)


model = eqx.nn.MLP(2, 2, 32, 2, key=jax.random.key(0))
start = model, optimizer.init(eqx.filter(model, eqx.is_array))
with ps.feed(DataLoader(Spirals(), batch_size=64, shuffle=True)) as batches:  # its place in the data cannot be saved
    print(f"torch DataLoader: loss {train(batches, 64, *start)[-1]:.4f} after an epoch")

loader = ps.Loader(Spirals(), batch_size=64, shuffle=True, seed=1, workers=2)
with ps.feed(loader) as batches:
    *middle, _ = train(batches, 50, *start)
    state = json.dumps(batches.state())  # save it beside the model
    straight = train(batches, 50, *middle)[-1]
with ps.feed(loader) as batches:
    batches.restore(json.loads(state))
    resumed = train(batches, 50, *middle)[-1]
print(f"penstock Loader: loss {straight:.4f} after 100 steps, {resumed:.4f} if resumed after 50")
assert resumed == straight < 0.1
