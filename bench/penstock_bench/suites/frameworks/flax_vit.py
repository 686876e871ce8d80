"""Define the ViT in Flax NNX, and exchange its weights with the canonical ones.

It shares no block with `penstock.recipes.vit`. This one is written for the speed of XLA on CPUs. It fixes the precision of each
operation, and keeps its weights in the layout that all frameworks share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from penstock_bench.suites.frameworks.experiment import LAYER_NORM_EPSILON, Geometry
from penstock_bench.suites.frameworks.weights import Weights


class ViT(nnx.Module):
    """Images [B, H, W, 3] → logits [B, classes], float32.

    Args:
      dtype: the dtype of the inputs and results of matrix products. Everything else is float32: parameters, residual stream,
        norms, softmax.
    """

    def __init__(self, geometry: Geometry, dtype: Any, fused: bool, *, rngs: nnx.Rngs):
        width, self._patch = geometry.width, geometry.patch
        self._width = width
        # A convolution whose stride equals its width is a matrix product, which is faster in XLA.
        self.patch = nnx.Linear(3 * geometry.patch**2, width, dtype=dtype, rngs=rngs)
        self.cls = nnx.Param(jnp.zeros(width))
        self.position = nnx.Param(jnp.zeros((geometry.tokens, width)))
        make = (Block(width, geometry.heads, dtype, fused, rngs=rngs) for _ in range(geometry.depth))
        self.blocks = nnx.List(list(make))
        self.norm = nnx.LayerNorm(width, epsilon=LAYER_NORM_EPSILON, rngs=rngs)
        self.head = nnx.Linear(width, geometry.classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        patches = self.patch(_patches(images, self._patch))
        cls = jnp.broadcast_to(self.cls[...], (len(images), 1, self._width))
        tokens = jnp.concatenate([cls, patches.astype(cls.dtype)], axis=1) + self.position[...]
        # The tokens of all images are in one dimension. The gradient of a linear layer over [B, T, D] needs transposed
        # cotangents. XLA for CPUs then recomputes the cotangents of the residual stream in every layer, from results of other
        # layers. This takes up to a tenth of a step.
        rows = tokens.reshape(-1, self._width)
        for block in self.blocks:
            rows = block(rows, len(images))
        # Norm and head only need the class token, so it is selected first.
        return self.head(self.norm(rows.reshape(tokens.shape)[:, 0])).astype(jnp.float32)


class Block(nnx.Module):
    """Tokens of all images [B · T, D], B → the same."""

    def __init__(self, width: int, heads: int, dtype: Any, fused: bool, *, rngs: nnx.Rngs):
        self._heads, self._fused = heads, fused
        self.norm1 = nnx.LayerNorm(width, epsilon=LAYER_NORM_EPSILON, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, epsilon=LAYER_NORM_EPSILON, rngs=rngs)
        self.widen = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.narrow = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Array, images: int) -> Array:
        qkv = self.qkv(self.norm1(tokens)).reshape(images, -1, 3, self._heads, tokens.shape[-1] // self._heads)
        query, key, value = (qkv[:, :, part] for part in range(3))
        mixed = self._attend(query, key, value).reshape(tokens.shape)
        tokens = tokens + self.out(mixed)
        return tokens + self.narrow(gelu(self.widen(self.norm2(tokens))))

    def _attend(self, query: Array, key: Array, value: Array) -> Array:
        """Attend with heads [B, T, heads, D / heads], and return the same shape."""
        if self._fused:
            # Only cuDNN is fused: without `implementation`, JAX emits the same products and softmax as `explicit_attention`.
            return jax.nn.dot_product_attention(query, key, value, implementation="cudnn")
        return explicit_attention(query, key, value)


def explicit_attention(query: Array, key: Array, value: Array) -> Array:
    # The scale is a power of two in all geometries, so it causes no rounding, wherever it is applied.
    scores = jnp.einsum("bqhd,bkhd->bhqk", query * query.shape[-1] ** -0.5, key)
    probabilities = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", probabilities, value)


def gelu(hidden: Array) -> Array:
    """Return the exact GELU; from bfloat16 to bfloat16 with float32 in between, as PyTorch's kernel does it."""
    x = hidden.astype(jnp.float32)
    # With erf, as PyTorch and the reference. `jax.nn.gelu` uses erfc, which is slower.
    return (0.5 * x * (1 + jax.lax.erf(x * 2**-0.5))).astype(hidden.dtype)


def _patches(images: Array, patch: int) -> Array:
    """Cut images into patches: [B, H, W, 3] → [B, H/patch · W/patch, patch · patch · 3]."""
    batch, height, width, channels = images.shape
    grid = images.reshape(batch, height // patch, patch, width // patch, patch, channels)
    return grid.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, patch * patch * channels)


def load(params: nnx.State, weights: Weights) -> nnx.State:
    """Return the parameters with canonical weights."""
    paths = {name: path for name, path, _ in _canonical(params)}
    flat = dict(nnx.to_flat_state(params))
    for name, path in paths.items():
        variable = flat[path]
        flat[path] = variable.replace(jnp.asarray(weights[name].reshape(variable.shape)))
    return nnx.from_flat_state(flat)


def canonical(params: nnx.State, geometry: Geometry) -> dict[str, np.ndarray]:
    """Return the weights by their canonical names, in canonical layout."""
    patch = geometry.patch
    # Copies: with a NumPy view of it, the next step could not reuse the donated memory.
    values = {name: np.array(variable[...]) for name, _, variable in _canonical(params)}
    return {**values, "patch/kernel": values["patch/kernel"].reshape(patch, patch, 3, -1)}


def _canonical(params: nnx.State) -> Iterator[tuple[str, Any, Any]]:
    for path, variable in nnx.to_flat_state(params):
        yield "/".join(map(str, path)), path, variable
