"""A small Vision Transformer: Dosovitskiy et al. 2021, arXiv:2010.11929.

Images go in, logits come out. Two changes adapt it to a thousand tiny images. A convolution comes before the patches (Xiao et al.
2021, arXiv:2106.14881). The position embeddings are initially as large as those of the patches, so that positions matter from
step 0 on.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


@dataclass(frozen=True)
class Sizes:
    """The sizes of a ViT. The defaults give 73 thousand parameters for 8×8 images with one channel.

    Attributes:
      image: height and width of an image, a multiple of `patch`.
      patch: height and width of a patch, which becomes a token.
      stem: channels of the convolution before the patches.
      width: channels of a token, a multiple of `heads`.
      depth: number of blocks.
      heads: attention heads of a block.
      classes: number of logits.
    """

    image: int = 8
    patch: int = 2
    stem: int = 16
    width: int = 64
    depth: int = 2
    heads: int = 4
    classes: int = 10

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
