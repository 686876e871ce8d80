"""Make the data, the optimizer and the losses that train steps have in common, and the step of models that are functions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import optax
from jax import Array

from penstock_bench.suites.shard.zoo.model import PyTree

SEED = 0

Loss = Callable[[PyTree, PyTree], Array]  # parameters, batch → []


def adamw(learning_rate: float = 1e-3) -> optax.GradientTransformation:
    """Return AdamW as transformers are trained with it: warm-up and cosine decay, clipped gradients, biases and norms not
    decayed.
    """
    schedule = optax.warmup_cosine_decay_schedule(learning_rate / 2, learning_rate, warmup_steps=10, decay_steps=10_000)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1, mask=_matrices))


def _matrices(params: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def init_state(params: PyTree, optimizer: optax.GradientTransformation) -> PyTree:
    return {"params": params, "optimizer": optimizer.init(params)}


def train_step(loss: Loss, optimizer: optax.GradientTransformation) -> Callable[[PyTree, PyTree], tuple[PyTree, Array]]:
    """Return the step over the state of `init_state`."""

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, Array]:
        params = state["params"]
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, state["optimizer"], params)
        return {"params": optax.apply_updates(params, updates), "optimizer": moments}, value

    return step


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Return the mean over all labels in nats: logits [..., V], labels [...] → []."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def normal(key: Array, *shape: int) -> Array:
    """Return weights [fan in, ...] with a variance of 1 / fan in."""
    return jax.random.normal(key, shape) * shape[0] ** -0.5


def text(seed: int, batch: int, length: int, vocabulary: int) -> dict[str, np.ndarray]:
    """Return tokens [B, T] and, at each position, the token after it, some much more frequent than others; int32."""
    uniform = np.random.default_rng(seed).random((batch, length + 1))
    tokens = (vocabulary * uniform**4).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def pictures(seed: int, batch: int, size: int, channels: int, classes: int) -> dict[str, np.ndarray]:
    """Return images [B, S, S, C] float32, and labels [B] int32 that a linear layer could tell from them."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=batch, dtype=np.int32)
    prototypes = np.random.default_rng(SEED).standard_normal((classes, size, size, channels), np.float32)
    return {"images": prototypes[labels] + rng.standard_normal((batch, size, size, channels), np.float32), "labels": labels}
