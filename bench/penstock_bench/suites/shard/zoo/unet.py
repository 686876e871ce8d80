"""A U-Net (Ronneberger et al. 2015, arXiv:1505.04597) with GroupNorm, which predicts the class of each pixel."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from penstock_bench.suites.shard.zoo.model import Model, PyTree
from penstock_bench.suites.shard.zoo.training import adamw, cross_entropy, init_state, train_step
from penstock_bench.suites.shard.zoo.training_equinox import params_of, static_of

_CHANNELS = (32, 64, 128)
_SIZE, _CLASSES, _BATCH = 64, 3, 16


class _UNet(eqx.Module):
    """An image [3, S, S] → logits [classes, S, S]."""

    down: list[_Block]
    pool: eqx.nn.MaxPool2d
    up: list[eqx.nn.ConvTranspose2d]
    joined: list[_Block]
    head: eqx.nn.Conv2d

    def __init__(self, key: Array):
        keys = iter(jax.random.split(key, 3 * len(_CHANNELS)))
        self.down = [_Block(fan_in, out, next(keys)) for fan_in, out in zip((3, *_CHANNELS), _CHANNELS, strict=False)]
        self.pool = eqx.nn.MaxPool2d(2, 2)
        upwards = list(zip(_CHANNELS[:0:-1], _CHANNELS[-2::-1], strict=True))
        self.up = [eqx.nn.ConvTranspose2d(deep, out, 2, 2, key=next(keys)) for deep, out in upwards]
        self.joined = [_Block(2 * out, out, next(keys)) for _, out in upwards]
        self.head = eqx.nn.Conv2d(_CHANNELS[0], _CLASSES, 1, key=next(keys))

    def __call__(self, x: Array) -> Array:
        skips = []
        for block in self.down[:-1]:
            skips.append(block(x))
            x = self.pool(skips[-1])
        x = self.down[-1](x)
        for up, block in zip(self.up, self.joined, strict=True):
            x = block(jnp.concatenate([skips.pop(), up(x)]))
        return self.head(x)


class _Block(eqx.Module):
    """[C, S, S] → [out, S, S]."""

    convs: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.GroupNorm]

    def __init__(self, channels: int, out: int, key: Array):
        first, second = jax.random.split(key)
        self.convs = [
            eqx.nn.Conv2d(channels, out, 3, padding=1, use_bias=False, key=first),
            eqx.nn.Conv2d(out, out, 3, padding=1, use_bias=False, key=second),
        ]
        self.norms = [eqx.nn.GroupNorm(8, out) for _ in self.convs]

    def __call__(self, x: Array) -> Array:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = jax.nn.silu(norm(conv(x)))
        return x


def unet() -> Model:
    optimizer, static = adamw(), static_of(_UNet)

    def loss(params: PyTree, batch: PyTree) -> Array:
        logits = jax.vmap(eqx.combine(params, static))(batch["images"])
        return cross_entropy(jnp.moveaxis(logits, 1, -1), batch["labels"])

    return Model("unet", "Equinox", lambda: init_state(params_of(_UNet), optimizer), _batch, train_step(loss, optimizer))


def _batch(seed: int) -> PyTree:
    images = np.random.default_rng(seed).standard_normal((_BATCH, 3, _SIZE, _SIZE), np.float32)
    return {"images": images, "labels": images.argmax(axis=1).astype(np.int32)}
