"""Define the ViT in Keras layers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
from keras import layers, ops

from penstock_bench.suites.frameworks.experiment import LAYER_NORM_EPSILON, Geometry
from penstock_bench.suites.frameworks.weights import Weights


def vit(geometry: Geometry, mixed: bool, fused: bool) -> keras.Model:
    """Return the model: images [B, H, W, 3] → logits [B, classes], float32.

    Args:
      geometry: the size of the images and of the model.
      mixed: whether matrix products take and return bfloat16; everything else is float32.
      fused: whether to use cuDNN's fused attention.
    """
    products = "mixed_bfloat16" if mixed else "float32"
    images = keras.Input((geometry.image, geometry.image, 3), dtype="float32")
    tokens = Embedding(geometry, products, name="embedding")(images)
    for number in range(geometry.depth):
        tokens = Block(geometry, products, fused, name=f"blocks_{number}")(tokens)
    # Norm and head only need the class token, so it is selected first.
    token = layers.LayerNormalization(epsilon=LAYER_NORM_EPSILON, dtype="float32", name="norm")(tokens[:, 0])
    logits = layers.Dense(geometry.classes, dtype=products, name="head")(token)
    return keras.Model(images, layers.Activation("linear", dtype="float32")(logits))


class Embedding(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Images [B, H, W, 3] → tokens [B, T, D]: the class token and the patches, plus position embeddings."""

    def __init__(self, geometry: Geometry, products: str, **kwargs: Any):
        super().__init__(dtype="float32", **kwargs)
        self._geometry = geometry
        # A convolution whose stride equals its width is a matrix product, which is faster in XLA.
        self.patch = layers.Dense(geometry.width, dtype=products, name="patch")

    def build(self, shape: tuple[int | None, ...]) -> None:
        width, patch = self._geometry.width, self._geometry.patch
        self.patch.build((None, None, 3 * patch**2))
        self.cls = self.add_weight(shape=(width,), name="cls")
        self.position = self.add_weight(shape=(self._geometry.tokens, width), name="position")

    def call(self, images: Any) -> Any:
        patch, side = self._geometry.patch, self._geometry.image // self._geometry.patch
        grid = ops.reshape(images, (-1, side, patch, side, patch, 3))
        patches = self.patch(ops.reshape(ops.transpose(grid, (0, 1, 3, 2, 4, 5)), (-1, side * side, 3 * patch**2)))
        cls = ops.broadcast_to(self.cls, (ops.shape(images)[0], 1, self._geometry.width))
        return ops.concatenate([cls, ops.cast(patches, "float32")], axis=1) + self.position


class Block(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """[B, T, D] → [B, T, D].

    Inside a block, the tokens of all images are in one dimension, which is faster in XLA (see `flax_vit`). Between blocks they
    are in two dimensions, because Keras would not know that their number is a multiple of T. XLA removes both reshapes.
    """

    def __init__(self, geometry: Geometry, products: str, fused: bool, **kwargs: Any):
        super().__init__(dtype="float32", **kwargs)
        self._geometry, self._fused = geometry, fused
        width = geometry.width
        self.norm1 = layers.LayerNormalization(epsilon=LAYER_NORM_EPSILON, dtype="float32", name="norm1")
        self.qkv = layers.Dense(3 * width, dtype=products, name="qkv")
        self.out = layers.Dense(width, dtype=products, name="out")
        self.norm2 = layers.LayerNormalization(epsilon=LAYER_NORM_EPSILON, dtype="float32", name="norm2")
        self.widen = layers.Dense(4 * width, dtype=products, name="widen")
        self.narrow = layers.Dense(width, dtype=products, name="narrow")

    def build(self, shape: tuple[int | None, ...]) -> None:
        for layer in (self.norm1, self.qkv, self.out, self.norm2, self.widen):
            layer.build((None, self._geometry.width))
        self.narrow.build((None, 4 * self._geometry.width))

    def call(self, tokens: Any) -> Any:
        rows = ops.reshape(tokens, (-1, self._geometry.width))
        rows = rows + self.out(self._attend(self.qkv(self.norm1(rows))))
        hidden = self.widen(self.norm2(rows))
        return ops.reshape(rows + self.narrow(gelu(hidden)), (-1, self._geometry.tokens, self._geometry.width))

    def _attend(self, qkv: Any) -> Any:
        geometry = self._geometry
        parts = ops.reshape(qkv, (-1, geometry.tokens, 3, geometry.heads, geometry.width // geometry.heads))
        query, key, value = (parts[:, :, part] for part in range(3))
        if self._fused:
            # True, not None: None would silently use plain XLA where cuDNN is not available.
            mixed = ops.dot_product_attention(query, key, value, flash_attention=True)
        else:
            mixed = explicit_attention(query, key, value)
        return ops.reshape(mixed, (-1, geometry.width))


def explicit_attention(query: Any, key: Any, value: Any) -> Any:
    """Attend with heads [B, T, heads, D / heads], and return the same shape."""
    # The scale is a power of two in all geometries, so it causes no rounding, wherever it is applied.
    scores = ops.einsum("bqhd,bkhd->bhqk", query * query.shape[-1] ** -0.5, key)
    probabilities = ops.cast(ops.softmax(ops.cast(scores, "float32"), axis=-1), value.dtype)
    return ops.einsum("bhqk,bkhd->bqhd", probabilities, value)


def gelu(hidden: Any) -> Any:
    """Return the exact GELU; from bfloat16 to bfloat16 with float32 in between, as PyTorch's kernel does it."""
    x = ops.cast(hidden, "float32")
    # With erf, as PyTorch and the reference. `ops.gelu` uses erfc, which is slower.
    return ops.cast(0.5 * x * (1 + ops.erf(x * 2**-0.5)), hidden.dtype)


def load(model: keras.Model, weights: Weights) -> None:
    """Give the model canonical weights."""
    for name, variable in _canonical(model):
        variable.assign(weights[name].reshape(variable.shape))


def canonical(model: keras.Model, geometry: Geometry) -> dict[str, np.ndarray]:
    """Return the model's weights by their canonical names, in canonical layout."""
    patch = geometry.patch
    values = {name: np.array(variable.value) for name, variable in _canonical(model)}
    return {**values, "patch/kernel": values["patch/kernel"].reshape(patch, patch, 3, -1)}


def _canonical(model: keras.Model) -> Iterator[tuple[str, keras.Variable]]:
    for variable in model.trainable_variables:
        name = variable.path.removeprefix("embedding/").replace("blocks_", "blocks/")
        yield name.replace("/gamma", "/scale").replace("/beta", "/bias"), variable
