"""Llama (Touvron et al. 2023, arXiv:2302.13971): RMSNorm, rotary positions, SwiGLU, and fewer key/value heads than query heads.

The layers are called in a loop, or stacked and scanned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from penstock_bench.suites.shard.zoo.model import Layout, Model, PyTree
from penstock_bench.suites.shard.zoo.training import SEED, adamw, cross_entropy, init_state, normal, text, train_step

# [..., D], weight → [..., F]
Linear = Callable[[Array, PyTree], Array]


@dataclass(frozen=True)
class Size:
    """The sizes of a model and its batch: D, layers, query heads, key/value heads, F, V, B and T."""

    width: int = 512
    layers: int = 2
    heads: int = 8
    key_value_heads: int = 2
    hidden: int = 1536
    vocabulary: int = 4096
    batch: int = 16
    length: int = 128

    @property
    def head(self) -> int:
        return self.width // self.heads


# Keys and values are replicated: there are fewer heads of them than devices on the axis.
LAYER_LAYOUT: Layout = (
    ("wq$", (None, "model")),
    ("wo$", ("model", None)),
    ("w_gate$", (None, "model")),
    ("w_up$", (None, "model")),
    ("w_down$", ("model", None)),
)
EMBEDDING_LAYOUT: Layout = (("embedding$", ("model", None)), ("head$", (None, "model")))


def gqa() -> Model:
    return _in_a_loop("llama-gqa", Size())


def mqa() -> Model:
    return _in_a_loop("llama-mqa", Size(key_value_heads=1))


def scan() -> Model:
    """Return four narrower layers and a larger batch, so that activations need the room; they are computed again."""
    size = Size(width=256, layers=4, hidden=1024, batch=32)
    optimizer = adamw()

    def init() -> PyTree:
        params = init_params(size)
        return init_state(params | {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])}, optimizer)

    def loss(params: PyTree, batch: PyTree) -> Array:
        body = jax.checkpoint(lambda x, layer: (block(layer, x, size), None))
        x, _ = jax.lax.scan(body, params["embedding"][batch["tokens"]], params["layers"])
        return cross_entropy(logits(params, x), batch["targets"])

    layout = tuple((pattern, (None, *spec)) for pattern, spec in LAYER_LAYOUT) + EMBEDDING_LAYOUT
    return Model("llama-scan", "JAX", init, partial(batch, size=size), train_step(loss, optimizer), layout)


def _in_a_loop(name: str, size: Size) -> Model:
    optimizer = adamw()

    def loss(params: PyTree, batch: PyTree) -> Array:
        return cross_entropy(forward(params, batch["tokens"], size), batch["targets"])

    step = train_step(loss, optimizer)
    layout = LAYER_LAYOUT + EMBEDDING_LAYOUT
    return Model(name, "JAX", lambda: init_state(init_params(size), optimizer), partial(batch, size=size), step, layout)


def batch(seed: int, size: Size) -> PyTree:
    return text(seed, size.batch, size.length, size.vocabulary)


def init_params(size: Size) -> PyTree:
    embedding, head, *layers = jax.random.split(jax.random.key(SEED), 2 + size.layers)
    return {
        "embedding": jax.random.normal(embedding, (size.vocabulary, size.width)) * 0.02,
        "layers": [init_attention(layer, size) | _init_swiglu(layer, size) for layer in layers],
        "norm": jnp.ones(size.width),
        "head": normal(head, size.width, size.vocabulary),
    }


def init_attention(key: Array, size: Size) -> PyTree:
    keys = jax.random.split(jax.random.fold_in(key, 0), 4)
    key_values = size.key_value_heads * size.head
    return {
        "attention_norm": jnp.ones(size.width),
        "wq": normal(keys[0], size.width, size.width),
        "wk": normal(keys[1], size.width, key_values),
        "wv": normal(keys[2], size.width, key_values),
        "wo": normal(keys[3], size.width, size.width),
    }


def _init_swiglu(key: Array, size: Size) -> PyTree:
    keys = jax.random.split(jax.random.fold_in(key, 1), 3)
    return {
        "mlp_norm": jnp.ones(size.width),
        "w_gate": normal(keys[0], size.width, size.hidden),
        "w_up": normal(keys[1], size.width, size.hidden),
        "w_down": normal(keys[2], size.hidden, size.width),
    }


def forward(params: PyTree, tokens: Array, size: Size, linear: Linear = jnp.matmul) -> Array:
    """Compute logits: tokens [B, T] → [B, T, V]."""
    x = params["embedding"][tokens]
    for layer in params["layers"]:
        x = block(layer, x, size, linear)
    return logits(params, x)


def logits(params: PyTree, x: Array) -> Array:
    """Compute logits from the last hidden state: [B, T, D] → [B, T, V]."""
    return rms_norm(x, params["norm"]) @ params["head"]


def block(layer: PyTree, x: Array, size: Size, linear: Linear = jnp.matmul) -> Array:
    """Apply a block: [B, T, D] → the same."""
    x = x + attention(layer, rms_norm(x, layer["attention_norm"]), size, linear)
    normed = rms_norm(x, layer["mlp_norm"])
    gated = jax.nn.silu(linear(normed, layer["w_gate"])) * linear(normed, layer["w_up"])
    return x + linear(gated, layer["w_down"])


def attention(layer: PyTree, x: Array, size: Size, linear: Linear = jnp.matmul) -> Array:
    """Attend causally; query heads share keys and values in groups (Ainslie et al. 2023, arXiv:2305.13245): [B, T, D] → same."""
    batch, length, _ = x.shape
    query = linear(x, layer["wq"]).reshape(batch, length, size.heads, size.head)
    key = linear(x, layer["wk"]).reshape(batch, length, size.key_value_heads, size.head)
    value = linear(x, layer["wv"]).reshape(batch, length, size.key_value_heads, size.head)
    query, key = _rotate(query), _rotate(key)
    # Repeated, so that query heads can be split over more devices than there are key/value heads.
    key, value = (jnp.repeat(heads, size.heads // size.key_value_heads, axis=2) for heads in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * size.head**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
    return linear(mixed.reshape(batch, length, size.width), layer["wo"])


def _rotate(x: Array) -> Array:
    """Apply rotary positions (Su et al. 2021, arXiv:2104.09864): [B, T, heads, head] → the same."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies  # [T, 1, head/2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rms_norm(x: Array, scale: Array) -> Array:
    """Normalise by the root mean square: [..., D], [D] → [..., D]."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale
