"""Train a language model on a memory-mapped file of tokens, and resume it in the middle of an epoch, bit for bit.

pip install "penstock[train]" && python lm_memmap.py
"""

import json
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
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


@nnx.jit
def step(model: LanguageModel, optimizer: nnx.Optimizer, window: jax.Array) -> jax.Array:
    value, gradients = nnx.value_and_grad(lambda model: cross_entropy(model(window[:, :-1]), window[:, 1:]).mean())(model)
    optimizer.update(model, gradients)
    return value


def train(first: int, last: int, checkpoint: Path) -> list[float]:
    """Train from step `first` to `last`, and save at the end; if `first` is not 0, begin with the checkpoint."""
    windows = ps.windows(np.memmap(RUN / "tokens.bin", np.uint16, mode="r"), LENGTH + 1, stride=LENGTH)
    loader = ps.Loader(windows, batch_size=16, shuffle=True, seed=1)
    state = (model := LanguageModel(nnx.Rngs(0)), nnx.Optimizer(model, optax.adam(0.005), wrt=nnx.Param))
    with ocp.StandardCheckpointer() as saver, ps.feed(loader, transform=lambda window: window.astype("int32")) as batches:
        if first:
            nnx.update(state, saver.restore(checkpoint / "model", nnx.state(state)))
            batches.restore(json.loads((checkpoint / "data.json").read_text()))
        losses = [step(*state, next(batches)) for _ in range(first, last)]
        saver.save(checkpoint / "model", nnx.state(state), force=True)
        (checkpoint / "data.json").write_text(json.dumps(batches.state()))
    return [float(loss) for loss in losses]


losses = train(0, 120, RUN / "straight")
print(f"the loss fell from {losses[0]:.2f} to {losses[-1]:.2f}")
assert losses[-1] < 0.5 * losses[0]
assert train(0, 60, RUN / "stopped") + train(60, 120, RUN / "stopped") == losses
