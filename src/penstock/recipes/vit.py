"""Train a small Vision Transformer (ViT) to classify images: Dosovitskiy et al. 2021, arXiv:2010.11929.

Two changes adapt it to a thousand tiny images. A convolution comes before the patches (Xiao et al. 2021, arXiv:2106.14881). The
position embeddings are initially as large as the embeddings of patches, so that positions matter from step 0 on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

import penstock as ps
from penstock.data.tree import Batch


class State(NamedTuple):
    """The values that training changes: parameters and optimizer state."""

    parameters: Any
    optimizer: Any


@dataclass(frozen=True)
class Classifier:
    """A small ViT and its training with AdamW, for `ps.fit`.

    Batches are dicts: `image` float [B, 8, 8, 1], `label` int [B], and for the evaluation perhaps `mask` bool [B].
    """

    init: Callable[[], State]  # returns the state at step 0
    train: Callable[[State, Batch], tuple[State, dict[str, ps.Mean]]]
    evaluate: Callable[[State, Batch], dict[str, ps.Mean]]  # counts the records where the mask is true


def make_classifier(steps: int, seed: int) -> Classifier:
    """Return the functions of a classifier, whose learning rate is 0 after `steps` steps."""
    structure = nnx.graphdef(nnx.eval_shape(lambda: ViT(Sizes(), rngs=nnx.Rngs(0))))
    optimizer = _optimizer(steps)

    def init() -> State:
        # "rbg" is one XLA operation for each draw, which compiles in a third of the time of the default generator.
        parameters = nnx.state(ViT(Sizes(), rngs=nnx.Rngs(jax.random.key(seed, impl="rbg"))))
        return State(parameters, optimizer.init(parameters))

    def train(state: State, batch: Batch) -> tuple[State, dict[str, ps.Mean]]:
        def loss(parameters: Any) -> tuple[Array, dict[str, ps.Mean]]:
            metrics = _metrics(nnx.merge(structure, parameters)(batch["image"]), batch)
            return metrics["loss"].total / metrics["loss"].count, metrics

        gradients, metrics = jax.grad(loss, has_aux=True)(state.parameters)
        updates, moments = optimizer.update(gradients, state.optimizer, state.parameters)
        return State(optax.apply_updates(state.parameters, updates), moments), metrics

    def evaluate(state: State, batch: Batch) -> dict[str, ps.Mean]:
        return _metrics(nnx.merge(structure, state.parameters)(batch["image"]), batch)

    return Classifier(jax.jit(init), train, evaluate)


# Tuned on the digits, for 1000 steps with batches of 64. The rate is not sensitive: 4e-3 with batches of 128 is as good.
_PEAK_RATE, _WEIGHT_DECAY, _WARM_UP = 3e-3, 0.05, 0.1


def _optimizer(steps: int) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(0.0, _PEAK_RATE, warmup_steps=max(1, int(_WARM_UP * steps)), decay_steps=steps + 1)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=_WEIGHT_DECAY))


def _metrics(logits: Array, batch: Batch) -> dict[str, ps.Mean]:
    labels = batch["label"]
    mask = batch.get("mask", jnp.ones(labels.shape, bool))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    correct = jnp.argmax(logits, axis=-1) == labels
    loss, right, records = (jnp.sum(jnp.where(mask, values, 0), dtype=jnp.float32) for values in (losses, correct, mask))
    return {"loss": ps.Mean(loss, records), "accuracy": ps.Mean(right, records)}


# The model.


@dataclass(frozen=True)
class Sizes:
    """The sizes of a ViT. The defaults give 73 thousand parameters for 8×8 images with one channel."""

    image: int = 8  # height and width of an image, a multiple of `patch`
    patch: int = 2  # height and width of a patch, which becomes a token
    stem: int = 16  # channels of the convolution before the patches
    width: int = 64  # channels of a token, a multiple of `heads`
    depth: int = 2  # number of blocks
    heads: int = 4  # attention heads of a block
    classes: int = 10  # number of logits

    @property
    def tokens(self) -> int:
        """Return the number of patches of an image."""
        return (self.image // self.patch) ** 2


class ViT(nnx.Module):
    """A Vision Transformer: images [B, H, W, 1], float → logits [B, classes]."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs):
        patch = (sizes.patch, sizes.patch)
        self.stem = nnx.Conv(1, sizes.stem, kernel_size=(3, 3), rngs=rngs)
        self.patches = nnx.Conv(sizes.stem, sizes.width, kernel_size=patch, strides=patch, rngs=rngs)
        self.position = nnx.Param(0.5 * jax.random.normal(rngs.params(), (sizes.tokens, sizes.width)))
        self.blocks = nnx.List([Block(sizes.width, sizes.heads, 2 * sizes.width, rngs=rngs) for _ in range(sizes.depth)])
        self.norm = nnx.LayerNorm(sizes.width, rngs=rngs)
        self.head = nnx.Linear(sizes.width, sizes.classes, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        patches = self.patches(jax.nn.gelu(self.stem(images)))
        tokens = patches.reshape(patches.shape[0], -1, patches.shape[-1]) + self.position[...]
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(jnp.mean(self.norm(tokens), axis=1))


class Block(nnx.Module):
    """A transformer block: attention between tokens, then a two-layer network on each token. [B, T, D] → [B, T, D].

    Args:
      hidden: channels between the two layers.
    """

    def __init__(self, width: int, heads: int, hidden: int, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.widen = nnx.Linear(width, hidden, rngs=rngs)
        self.narrow = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + self.narrow(jax.nn.gelu(self.widen(self.norm2(tokens))))
