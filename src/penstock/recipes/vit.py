"""A small Vision Transformer (Dosovitskiy et al. 2021, arXiv:2010.11929), with pre-norm blocks and mean pooling."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


@dataclass(frozen=True)
class Shape:
    """Sizes of a ViT; the defaults make 107 thousand parameters of 8×8 images with one channel.

    Attributes:
      image: height and width of an image, a multiple of `patch`.
      patch: height and width of the squares that become tokens.
      width: channels of a token, a multiple of `heads`.
      classes: logits to give.
    """

    image: int = 8
    patch: int = 2
    width: int = 64
    depth: int = 3
    heads: int = 4
    classes: int = 10
    pos: float = 0.5
    stem: int = 1

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2


class Block(nnx.Module):
    """Attention between the tokens, then a two-layer network on each: [B, T, D] → [B, T, D]."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.widen = nnx.Linear(width, 2 * width, rngs=rngs)
        self.narrow = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.narrow(jax.nn.gelu(self.widen(self.mlp_norm(x))))


class ViT(nnx.Module):
    """Images [B, H, W, 1], float → logits [B, classes]."""

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs):
        patch = (shape.patch, shape.patch)
        if shape.stem: self.stem = nnx.Conv(1, 16, kernel_size=(3,3), rngs=rngs)
        self.s = shape.stem
        self.patches = nnx.Conv(16 if shape.stem else 1, shape.width, kernel_size=patch, strides=patch, rngs=rngs)
        self.position = nnx.Param(shape.pos * jax.random.normal(rngs.params(), (shape.tokens, shape.width)))
        self.blocks = nnx.List([Block(shape.width, shape.heads, rngs=rngs) for _ in range(shape.depth)])
        self.norm = nnx.LayerNorm(shape.width, rngs=rngs)
        self.head = nnx.Linear(shape.width, shape.classes, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        if self.s: images = jax.nn.gelu(self.stem(images))
        tokens = self.patches(images)
        x = tokens.reshape(tokens.shape[0], -1, tokens.shape[-1]) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(self.norm(x), axis=1))
