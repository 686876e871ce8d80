"""A diffusion transformer (Peebles and Xie 2022, arXiv:2212.09748) with adaLN-zero, over latents.

The state holds the key that noise and time steps are drawn with, and the moving average of the parameters that one samples from.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from penstock_bench.suites.shard.zoo.model import Layout, Model, PyTree
from penstock_bench.suites.shard.zoo.training import SEED, adamw
from penstock_bench.suites.shard.zoo.training_equinox import params_of, static_of

_SIZE, _CHANNELS, _PATCH, _CLASSES, _BATCH = 16, 4, 2, 32, 32
_WIDTH, _LAYERS, _HEADS = 256, 2, 8
_GRID = _SIZE // _PATCH
_PIXELS = _CHANNELS * _PATCH**2  # numbers in a patch
_TIMES = 1000
_UNLABELLED = 0.1  # share of examples that are learned without their class
_DECAY = 0.999

_LAYOUT: Layout = (
    ("(query|key|value)_proj/weight$", ("model", None)),
    ("(query|key|value)_proj/bias$", ("model",)),
    ("output_proj/weight$", (None, "model")),
    ("widen/weight$", ("model", None)),
    ("widen/bias$", ("model",)),
    ("narrow/weight$", (None, "model")),
)


class _DiT(eqx.Module):
    """A noisy latent [C, S, S], its time step [] and class [] → the noise in it [C, S, S]."""

    patches: eqx.nn.Conv2d
    time: eqx.nn.MLP
    label: eqx.nn.Embedding
    blocks: list[_Block]
    modulation: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    out: eqx.nn.Linear

    def __init__(self, key: Array):
        patches, time, label, modulation, out, *blocks = jax.random.split(key, 5 + _LAYERS)
        self.patches = eqx.nn.Conv2d(_CHANNELS, _WIDTH, _PATCH, _PATCH, key=patches)
        self.time = eqx.nn.MLP(_WIDTH, _WIDTH, _WIDTH, 1, jax.nn.silu, key=time)
        self.label = eqx.nn.Embedding(_CLASSES + 1, _WIDTH, key=label)  # the last one is of no class
        self.blocks = [_Block(block) for block in blocks]
        self.modulation = _zero(eqx.nn.Linear(_WIDTH, 2 * _WIDTH, key=modulation))
        self.norm = eqx.nn.LayerNorm(_WIDTH, use_weight=False, use_bias=False)
        self.out = _zero(eqx.nn.Linear(_WIDTH, _PIXELS, key=out))

    def __call__(self, latent: Array, time: Array, label: Array) -> Array:
        condition = jax.nn.silu(self.time(_waves(time, _WIDTH)) + self.label(label))
        x = self.patches(latent).reshape(_WIDTH, -1).T + _positions()
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = jnp.split(self.modulation(condition), 2)
        out = jax.vmap(self.out)(jax.vmap(self.norm)(x) * (1 + scale) + shift)
        grid = out.reshape(_GRID, _GRID, _PATCH, _PATCH, _CHANNELS)
        return grid.transpose(4, 0, 2, 1, 3).reshape(_CHANNELS, _SIZE, _SIZE)


class _Block(eqx.Module):
    """Tokens [T, D], condition [D] → [T, D]."""

    modulation: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    widen: eqx.nn.Linear
    narrow: eqx.nn.Linear

    def __init__(self, key: Array):
        modulation, attention, widen, narrow = jax.random.split(key, 4)
        self.modulation = _zero(eqx.nn.Linear(_WIDTH, 6 * _WIDTH, key=modulation))
        self.norm = eqx.nn.LayerNorm(_WIDTH, use_weight=False, use_bias=False)
        biases = dict.fromkeys(("use_query_bias", "use_key_bias", "use_value_bias", "use_output_bias"), True)
        self.attention = eqx.nn.MultiheadAttention(_HEADS, _WIDTH, **biases, key=attention)
        self.widen = eqx.nn.Linear(_WIDTH, 4 * _WIDTH, key=widen)
        self.narrow = eqx.nn.Linear(4 * _WIDTH, _WIDTH, key=narrow)

    def __call__(self, x: Array, condition: Array) -> Array:
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(self.modulation(condition), 6)
        normed = jax.vmap(self.norm)(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attention(normed, normed, normed)
        normed = jax.vmap(self.norm)(x) * (1 + scale2) + shift2
        return x + gate2 * jax.vmap(lambda token: self.narrow(jax.nn.gelu(self.widen(token))))(normed)


def _zero(linear: eqx.nn.Linear) -> eqx.nn.Linear:
    """Initialise with zeros, so that at first a block changes nothing."""
    return jax.tree.map(jnp.zeros_like, linear)


def _waves(position: Array, width: int) -> Array:
    """Return sines and cosines: [...] → [..., width]."""
    frequencies = 10_000.0 ** (-jnp.arange(width // 2) / (width // 2))
    angles = position[..., None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def _positions() -> Array:
    """Return waves of the row and of the column of each patch: [T, D]."""
    row, column = jnp.divmod(jnp.arange(_GRID**2), _GRID)
    return jnp.concatenate([_waves(row, _WIDTH // 2), _waves(column, _WIDTH // 2)], axis=-1)


def dit() -> Model:
    optimizer, static = adamw(), static_of(_DiT)

    def init() -> PyTree:
        params = params_of(_DiT)
        average = jax.tree.map(jnp.copy, params)  # buffers of its own, so that both can be donated
        key = jax.random.key(SEED + 1)
        return {"params": params, "average": average, "optimizer": optimizer.init(params), "key": key}

    def loss(params: PyTree, batch: PyTree, key: Array) -> Array:
        model = eqx.combine(params, static)
        latents, labels = batch["latents"], batch["labels"]
        for_time, for_noise, for_label = jax.random.split(key, 3)
        time = jax.random.randint(for_time, labels.shape, 0, _TIMES)
        noise = jax.random.normal(for_noise, latents.shape)
        kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, _TIMES))[time][:, None, None, None]  # Ho et al. 2020, arXiv:2006.11239
        noisy = jnp.sqrt(kept) * latents + jnp.sqrt(1 - kept) * noise
        labels = jnp.where(jax.random.bernoulli(for_label, _UNLABELLED, labels.shape), _CLASSES, labels)
        return jnp.mean((jax.vmap(model)(noisy, time, labels) - noise) ** 2)

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, Array]:
        params = state["params"]
        key, now = jax.random.split(state["key"])
        value, gradients = jax.value_and_grad(loss)(params, batch, now)
        updates, moments = optimizer.update(gradients, state["optimizer"], params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, state["average"], 1 - _DECAY)
        return {"params": params, "average": average, "optimizer": moments, "key": key}, value

    return Model("dit", "Equinox", init, _batch, step, _LAYOUT)


def _batch(seed: int) -> PyTree:
    rng = np.random.default_rng(seed)
    return {
        "latents": rng.standard_normal((_BATCH, _CHANNELS, _SIZE, _SIZE), np.float32),
        "labels": rng.integers(_CLASSES, size=_BATCH, dtype=np.int32),
    }
