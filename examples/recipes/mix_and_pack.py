"""Train on a mixture of three sources of documents, packed, with masks that keep the documents of a pack apart.

pip install penstock optax && python mix_and_pack.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import penstock as ps

LENGTH = 128


def documents(number: int, step: int) -> list[np.ndarray]:
    """Make documents that count up from a random token, in the steps of their source. They stand for your data."""
    rng = np.random.default_rng(step)
    return [((rng.integers(30) + step * np.arange(n)) % 30 + 2).astype(np.uint16) for n in rng.integers(10, 200, number)]


packs = [ps.pack(source, LENGTH, eos=1) for source in (documents(2_000, 1), documents(500, 7), documents(100, 11))]
mixture = ps.mix(packs, {0: [0.75, 0.25, 0.0], 100: [0.25, 0.25, 0.5]})  # the third source from step 100 on
loader = ps.Loader(mixture, batch_size=16, shuffle=True, seed=1)


def logits_of(weights: dict, batch: dict) -> jax.Array:
    """Return the logits [B, L, V] of one layer of causal attention inside of each segment."""
    x = weights["tokens"][batch["tokens"].astype("int32")] + weights["positions"][batch["positions"]]
    query, key, value = jnp.split((x @ weights["attention"])[:, :, None], 3, axis=-1)  # one head
    same = batch["segment_ids"][:, None, :, None] == batch["segment_ids"][:, None, None, :]
    return (x + jax.nn.dot_product_attention(query, key, value, mask=same, is_causal=True)[:, :, 0]) @ weights["out"]


def loss_of(weights: dict, batch: dict) -> jax.Array:
    segments, targets = batch["segment_ids"], batch["tokens"][:, 1:].astype("int32")
    real = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)  # the target is of the same document
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(weights, batch)[:, :-1], targets).mean(where=real)


@jax.jit
def step(weights: dict, moments: tuple, batch: dict) -> tuple[dict, tuple, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(weights, batch)
    updates, moments = optimizer.update(gradients, moments)
    return optax.apply_updates(weights, updates), moments, loss


shapes = {"tokens": (32, 32), "positions": (LENGTH, 32), "attention": (32, 3 * 32), "out": (32, 32)}
weights = {name: jax.random.normal(jax.random.key(i), shape) / 10 for i, (name, shape) in enumerate(shapes.items())}
optimizer, losses = optax.adam(0.01), []
moments = optimizer.init(weights)
with ps.feed(loader) as batches:
    for _, batch in zip(range(200), batches, strict=False):
        weights, moments, loss = step(weights, moments, batch)
        losses.append(loss)
print(f"loss {losses[0]:.2f}, {losses[99]:.2f} before the third source, {losses[100]:.2f} with it, {losses[-1]:.2f} at the end")
assert losses[-1] < losses[99] < losses[0]
pack = jax.tree.map(lambda leaf: leaf[:1], loader[10**9])
alone = jax.tree.map(lambda leaf: leaf[:, pack["segment_ids"][0] == 2], pack)  # its second document
np.testing.assert_allclose(logits_of(weights, pack)[:, pack["segment_ids"][0] == 2], logits_of(weights, alone), atol=1e-4)
