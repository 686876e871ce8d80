"""Train a language model on a memory-mapped file of tokens, and resume it in the middle of an epoch, bit for bit.

pip install "penstock[train]" && python lm_memmap.py
"""

import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import penstock as ps

cross_entropy = optax.softmax_cross_entropy_with_integer_labels
RUN, LENGTH, VOCABULARY, WIDTH = Path(tempfile.mkdtemp()), 64, 32, 48
text = np.cumsum(np.random.default_rng(0).choice([1, 1, 1, 1, 1, 1, 2, 5], 100_001)) % VOCABULARY
text.astype(np.uint16).tofile(RUN / "tokens.bin")


class LanguageModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.tokens, self.positions = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 96, rngs=rngs), nnx.Linear(96, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(np.arange(tokens.shape[1]))
        return self.down(nnx.gelu(self.up(x + self.attention(x, mask=nnx.make_causal_mask(tokens)))))


graph, start = nnx.split(LanguageModel(nnx.Rngs(0)))
optimizer = optax.adam(0.005)


def step(state: tuple, window: jax.Array) -> tuple:
    def loss(parameters: nnx.State) -> jax.Array:
        return cross_entropy(nnx.merge(graph, parameters)(window[:, :-1]), window[:, 1:]).mean()

    value, gradients = jax.value_and_grad(loss)(state[0])
    updates, moments = optimizer.update(gradients, state[1])
    return (optax.apply_updates(state[0], updates), moments), {"loss": value}


def train(steps: int, folder: Path) -> list[float]:
    """Train to step `steps`, from the last checkpoint in the folder if there is one; return the losses."""
    windows = ps.windows(np.memmap(RUN / "tokens.bin", np.uint16, mode="r"), LENGTH + 1, stride=LENGTH)
    loader = ps.Loader(windows, batch_size=16, shuffle=True, seed=1)
    losses: dict[int, float] = {}
    with ps.feed(loader, transform=lambda window: window.astype("int32")) as batches:
        log = [lambda point: losses.update({point.step: point.metrics["loss"]} if point.kind == "train" else {})]
        ps.fit(step, (start, optimizer.init(start)), batches, steps=steps, checkpoint=folder, log=log, log_every=1)
    return list(losses.values())


losses = train(120, RUN / "straight")
print(f"the loss fell from {losses[0]:.2f} to {losses[-1]:.2f}")
assert losses[-1] < 0.5 * losses[0]
assert train(60, RUN / "stopped") + train(120, RUN / "stopped") == losses
