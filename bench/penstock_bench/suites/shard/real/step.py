"""Make train steps of transformers, written once with named places for the sharding constraints of an expert.

In: a size and a feed-forward part. Out: an initialiser of the state, and a step. The layers are stacked and scanned, or called in
a loop, and are computed again in the backward pass (Chen et al. 2016, arXiv:1604.06174). The precision is mixed (Micikevicius et
al. 2017, arXiv:1710.03740).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from penstock_bench.suites.shard.zoo.model import PyTree
from penstock_bench.suites.shard.zoo.training import SEED, adamw, init_state, normal, train_step

Step = Callable[[PyTree, PyTree], tuple[PyTree, Array]]
"""State, batch → state, loss []."""

Constrain = Callable[[str, Array], Array]
"""Name of a weight or an activation, its value → the same value, perhaps with a sharding constraint."""

FeedForward = Callable[[PyTree, Array, Constrain], tuple[Array, Any]]
"""Layer, normed activations [B, T, D] → the same shape, and a loss of its own [] or None."""

_BALANCE = 0.01  # weight of the feed-forward parts' own losses


@dataclass(frozen=True)
class Size:
    """The sizes of a model: D, layers, query heads, key/value heads, F, V and T, and the number of experts.

    Attributes:
      tied: the embedding is also the head.
      experts: 0 for a feed-forward part without experts.
      dtype: of the products and activations; the parameters and the optimizer's moments are float32.
      unrolled: the layers are called in a loop of Python, and are a list in the state; otherwise they are stacked and scanned.
      policy: the name of the policy of `jax.checkpoint` around each layer; None for no checkpoints.
    """

    width: int
    layers: int
    heads: int
    key_value_heads: int
    hidden: int
    vocabulary: int
    length: int = 2048
    tied: bool = False
    experts: int = 0
    dtype: Any = jnp.bfloat16
    unrolled: bool = False
    policy: str | None = "nothing_saveable"

    @property
    def head(self) -> int:
        return self.width // self.heads

    @property
    def groups(self) -> int:
        return self.heads // self.key_value_heads


def unconstrained(name: str, array: Array) -> Array:
    """Return the array as it is: the compiler chooses its sharding."""
    return array


def weight(tree: PyTree, name: str, dtype: Any, constrain: Constrain) -> Array:
    """Return a weight as it is used: in the dtype of the products, and in the layout of an expert."""
    return constrain(name, tree[name].astype(dtype))


def init(size: Size, init_feed_forward: Callable[[Array, Size], PyTree]) -> PyTree:
    """Return the state: float32 parameters, and AdamW's moments."""
    embedding, head, layers = jax.random.split(jax.random.key(SEED), 3)
    each = [_init_attention(key, size) | init_feed_forward(key, size) for key in jax.random.split(layers, size.layers)]
    params = {
        "embedding": jax.random.normal(embedding, (size.vocabulary, size.width)) * 0.02,
        "layers": each if size.unrolled else jax.tree.map(lambda *leaves: jnp.stack(leaves), *each),
        "norm": jnp.ones(size.width),
    }
    return init_state(params if size.tied else params | {"head": normal(head, size.width, size.vocabulary)}, adamw())


def _init_attention(key: Array, size: Size) -> PyTree:
    first, second = jax.random.split(jax.random.fold_in(key, 0))
    return {
        "attention_norm": jnp.ones(size.width),
        # The query heads of a group, its key and its value.
        "wqkv": normal(first, size.width, size.key_value_heads, (size.groups + 2) * size.head),
        "wo": normal(second, size.width, size.width),
        "mlp_norm": jnp.ones(size.width),
    }


def make_step(size: Size, feed_forward: FeedForward, constrain: Constrain = unconstrained) -> Step:
    """Return the step: state, {"tokens" [B, T], "targets" [B, T]} → state, loss []."""

    def loss(params: PyTree, batch: PyTree) -> Array:
        logits, own = _forward(params, batch["tokens"], size, feed_forward, constrain)
        return _cross_entropy(logits, batch["targets"]) + (0.0 if own is None else _BALANCE * jnp.mean(own))

    return train_step(loss, adamw())


def _forward(
    params: PyTree, tokens: Array, size: Size, feed_forward: FeedForward, constrain: Constrain
) -> tuple[Array, Array | None]:
    """Compute logits, [B, T] → [B, T, V], and the losses of the feed-forward parts [layers], if they have any."""
    block: Any = partial(_block, size=size, feed_forward=feed_forward, constrain=constrain)
    if size.policy is not None:
        # Inside of a scan, nothing else could merge the second computation with the first.
        policy = getattr(jax.checkpoint_policies, size.policy)
        block = jax.checkpoint(block, prevent_cse=size.unrolled, policy=policy)
    embedding = weight(params, "embedding", size.dtype, constrain)
    x = constrain("found", constrain("lookup", embedding)[constrain("tokens", tokens)])
    if size.unrolled:
        each = []
        for layer in params["layers"]:
            x, own = block(x, layer)
            each.append(own)
        losses = None if each[0] is None else jnp.stack(each)
    else:
        x, losses = jax.lax.scan(block, x, params["layers"])
    x = constrain("gathered", rms_norm(x, params["norm"]))
    head = constrain("head", embedding.T) if size.tied else weight(params, "head", size.dtype, constrain)
    return constrain("logits", x @ head), losses


def _block(x: Array, layer: PyTree, size: Size, feed_forward: FeedForward, constrain: Constrain) -> tuple[Array, Any]:
    """Apply a layer: [B, T, D] → the same, and the loss of its feed-forward part."""
    normed = constrain("gathered", rms_norm(x, layer["attention_norm"]))
    attended = _attention(layer, normed, size, constrain)
    x = constrain("residual", x + constrain("scattered", attended))
    normed = constrain("gathered", rms_norm(x, layer["mlp_norm"]))
    changed, own = feed_forward(layer, normed, constrain)
    return constrain("residual", x + constrain("scattered", changed)), own


def _attention(layer: PyTree, x: Array, size: Size, constrain: Constrain) -> Array:
    """Attend causally; query heads share keys and values in groups (Ainslie et al. 2023, arXiv:2305.13245): [B, T, D] → same."""
    batch, length, _ = x.shape
    # One product, so that the partial sums of its gradient are reduced once.
    mixed = constrain("qkv", jnp.einsum("btd,dkn->btkn", x, weight(layer, "wqkv", x.dtype, constrain)))
    query, key, value = jnp.split(mixed, (size.groups * size.head, (size.groups + 1) * size.head), axis=-1)
    query = query.reshape(batch, length, size.key_value_heads, size.groups, size.head)
    query, key = constrain("query", _rotate(query)), constrain("key", _rotate(key))
    scores = jnp.einsum("bqkgh,bskh->bkgqs", query, key, preferred_element_type=jnp.float32) * size.head**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    attended = jnp.einsum("bkgqs,bskh->bqkgh", jax.nn.softmax(scores).astype(x.dtype), value)
    return constrain("attended", attended.reshape(batch, length, size.width)) @ weight(layer, "wo", x.dtype, constrain)


def _rotate(x: Array) -> Array:
    """Apply rotary positions (Su et al. 2021, arXiv:2104.09864): [B, T, ..., head] → the same."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)  # [T, head / 2]
    angles = jnp.expand_dims(angles, tuple(range(1, x.ndim - 2)))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rms_norm(x: Array, scale: Array) -> Array:
    """Normalise by the root mean square, in float32: [..., D], [D] → [..., D] in the dtype of x."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def _cross_entropy(logits: Array, labels: Array) -> Array:
    """Return the mean over all labels in nats: logits [B, T, V], labels [B, T] → [].

    A comparison selects the logit of a label, where an index would need the full vocabulary on each device.
    """
    wide = logits.astype(jnp.float32)
    chosen = jnp.arange(logits.shape[-1]) == labels[..., None]
    return jnp.mean(jax.nn.logsumexp(wide, axis=-1) - jnp.sum(jnp.where(chosen, wide, 0.0), axis=-1))
