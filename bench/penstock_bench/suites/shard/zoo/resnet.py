"""A residual network (He et al. 2015, arXiv:1512.03385) for small pictures: strided stages, projected short-cuts."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax import Array

from penstock_bench.suites.shard.zoo.model import Model, PyTree
from penstock_bench.suites.shard.zoo.training import adamw, cross_entropy, pictures
from penstock_bench.suites.shard.zoo.training_nnx import init_and_step

_STAGES = ((32, 1), (32, 1), (64, 2), (64, 1), (128, 2), (128, 1))  # channels and stride of each block
_SIZE, _CLASSES, _BATCH = 32, 16, 64


class _ResNet(nnx.Module):
    """Images [B, S, S, 3] → logits [B, classes]."""

    def __init__(self, rngs: nnx.Rngs):
        channels = _STAGES[0][0]
        self.stem = nnx.Conv(3, channels, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(channels, rngs=rngs)
        blocks = []
        for wider, stride in _STAGES:
            blocks.append(_Block(channels, wider, stride, rngs))
            channels = wider
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(channels, _CLASSES, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        x = nnx.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


class _Block(nnx.Module):
    """[B, S, S, C] → [B, S / stride, S / stride, wider]."""

    def __init__(self, channels: int, wider: int, stride: int, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(channels, wider, (3, 3), strides=stride, use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(wider, rngs=rngs)
        self.conv2 = nnx.Conv(wider, wider, (3, 3), use_bias=False, rngs=rngs)
        # The last scale of a residual block starts at zero (Goyal et al. 2017, arXiv:1706.02677, section 5.1).
        self.norm2 = nnx.BatchNorm(wider, scale_init=nnx.initializers.zeros, rngs=rngs)
        projects = stride > 1 or wider != channels
        self.shortcut = nnx.Conv(channels, wider, (1, 1), strides=stride, use_bias=False, rngs=rngs) if projects else None

    def __call__(self, x: Array) -> Array:
        residual = self.norm2(self.conv2(nnx.relu(self.norm1(self.conv1(x)))))
        return nnx.relu(residual + (x if self.shortcut is None else self.shortcut(x)))


def resnet() -> Model:
    init, step = init_and_step(_ResNet, _loss, adamw())
    batch = partial(pictures, batch=_BATCH, size=_SIZE, channels=3, classes=_CLASSES)
    return Model("resnet", "NNX", init, batch, step)


def _loss(model: _ResNet, batch: PyTree) -> Array:
    return cross_entropy(model(batch["images"]), batch["labels"])
