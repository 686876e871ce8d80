"""A vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929) with a class token: an odd number of tokens."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax import Array

from penstock.recipes.vit import Block
from penstock_bench.suites.shard.zoo.model import Layout, Model, PyTree
from penstock_bench.suites.shard.zoo.training import adamw, cross_entropy, pictures
from penstock_bench.suites.shard.zoo.training_nnx import init_and_step

_SIZE, _PATCH, _CLASSES, _BATCH = 64, 8, 64, 32
_WIDTH, _LAYERS, _HEADS = 256, 3, 8
_TOKENS = (_SIZE // _PATCH) ** 2 + 1

_LAYOUT: Layout = (
    ("(query|key|value)/kernel/value$", (None, "model", None)),
    ("(query|key|value)/bias/value$", ("model", None)),
    ("out/kernel/value$", ("model", None, None)),
    ("widen/kernel/value$", (None, "model")),
    ("widen/bias/value$", ("model",)),
    ("narrow/kernel/value$", ("model", None)),
)


class _ViT(nnx.Module):
    """Images [B, S, S, 3] → logits [B, classes]."""

    def __init__(self, rngs: nnx.Rngs):
        self.patches = nnx.Conv(3, _WIDTH, (_PATCH, _PATCH), strides=_PATCH, padding="VALID", rngs=rngs)
        self.cls = nnx.Param(jnp.zeros(_WIDTH))
        self.positions = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (_TOKENS, _WIDTH)))
        self.blocks = nnx.List([Block(_WIDTH, _HEADS, 4 * _WIDTH, rngs=rngs) for _ in range(_LAYERS)])
        self.norm = nnx.LayerNorm(_WIDTH, rngs=rngs)
        self.head = nnx.Linear(_WIDTH, _CLASSES, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        patches = self.patches(images).reshape(len(images), -1, _WIDTH)
        cls = jnp.broadcast_to(self.cls[...], (len(images), 1, _WIDTH))
        x = jnp.concatenate([cls, patches], axis=1) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def vit() -> Model:
    init, step = init_and_step(_ViT, _loss, adamw())
    return Model("vit", "NNX", init, partial(pictures, batch=_BATCH, size=_SIZE, channels=3, classes=_CLASSES), step, _LAYOUT)


def _loss(model: _ViT, batch: PyTree) -> Array:
    return cross_entropy(model(batch["images"]), batch["labels"])
