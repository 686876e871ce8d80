"""Make train steps of an image classifier and of a text-to-text model in their published sizes, with layers that are scanned.

ViT-L/16 (Dosovitskiy et al. 2020, arXiv:2010.11929), with the mean of its patches instead of a class token; and T5 large (Raffel
et al. 2020, arXiv:1910.10683). The precision is mixed, as in `step.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from penstock_bench.suites.shard.real.step import Step, rms_norm
from penstock_bench.suites.shard.zoo.model import PyTree
from penstock_bench.suites.shard.zoo.training import SEED, adamw, cross_entropy, init_state, normal, train_step

_DTYPE = jnp.bfloat16
_WIDTH, _HEADS, _HIDDEN, _LAYERS = 1024, 16, 4096, 24  # of both models, and of both halves of T5
_HEAD = _WIDTH // _HEADS
_IMAGE, _PATCH, _CLASSES = 224, 16, 1000
_SOURCE, _TARGET, _VOCABULARY, _BUCKETS, _FAR = 512, 128, 32_128, 32, 128

Block = Callable[[Array, PyTree], Array]
"""Activations [B, T, D], layer → the same shape."""


@dataclass(frozen=True)
class Model:
    """A model without layouts by hand.

    Attributes:
      init: () → state.
      batch: number of rows → the abstract batch.
      step: state, batch → state, loss [].
      rows: the rows of a chip.
    """

    init: Callable[[], PyTree]
    batch: Callable[[int], PyTree]
    step: Step
    rows: int


def vit_large(policy: str | None, layers: int | None) -> Model:
    """Return ViT-L/16.

    Args:
      policy: the policy of `jax.checkpoint` around each layer; None for no checkpoints.
    """
    patches = (_IMAGE // _PATCH) ** 2

    def init() -> PyTree:
        keys = jax.random.split(jax.random.key(SEED), 3)
        params = {
            "patch": normal(keys[0], _PATCH * _PATCH * 3, _WIDTH),
            "positions": jnp.zeros((patches, _WIDTH)),
            "layers": _init_layers(keys[1], layers or _LAYERS, 1),
            "norm": jnp.ones(_WIDTH),
            "head": normal(keys[2], _WIDTH, _CLASSES),
        }
        return init_state(params, adamw())

    def block(x: Array, layer: PyTree) -> Array:
        normed = rms_norm(x, layer["norms"][0])
        return _feed_forward(x + _attend(layer, 0, normed, normed, None), layer, jax.nn.gelu)

    def loss(params: PyTree, batch: PyTree) -> Array:
        side = _IMAGE // _PATCH
        images = batch["images"].astype(_DTYPE).reshape(-1, side, _PATCH, side, _PATCH, 3)
        found = images.transpose(0, 1, 3, 2, 4, 5).reshape(-1, patches, _PATCH * _PATCH * 3)
        x = found @ params["patch"].astype(_DTYPE) + params["positions"].astype(_DTYPE)
        x = rms_norm(_scan(block, x, params["layers"], policy), params["norm"]).mean(1)
        return cross_entropy((x @ params["head"].astype(_DTYPE)).astype(jnp.float32), batch["labels"])

    def batch(rows: int) -> PyTree:
        images = jax.ShapeDtypeStruct((rows, _IMAGE, _IMAGE, 3), jnp.uint8)
        return {"images": images, "labels": jax.ShapeDtypeStruct((rows,), jnp.int32)}

    return Model(init, batch, train_step(loss, adamw()), rows=64)


def t5_large(policy: str | None, layers: int | None) -> Model:
    """Return T5 large. The arguments are as for `vit_large`."""

    def init() -> PyTree:
        keys = jax.random.split(jax.random.key(SEED), 3)
        params = {
            "embedding": jax.random.normal(keys[0], (_VOCABULARY, _WIDTH)),
            "encoder": {"layers": _init_layers(keys[1], layers or _LAYERS, 1), "bias": jnp.zeros((_BUCKETS, _HEADS))},
            "decoder": {"layers": _init_layers(keys[2], layers or _LAYERS, 2), "bias": jnp.zeros((_BUCKETS, _HEADS))},
            "norms": jnp.ones((2, _WIDTH)),
        }
        return init_state(params, adamw())

    def loss(params: PyTree, batch: PyTree) -> Array:
        embedding = params["embedding"].astype(_DTYPE)
        both_ways = _bias(params["encoder"]["bias"], _SOURCE, causal=False)
        causal = _bias(params["decoder"]["bias"], _TARGET, causal=True)

        def encode(x: Array, layer: PyTree) -> Array:
            normed = rms_norm(x, layer["norms"][0])
            return _feed_forward(x + _attend(layer, 0, normed, normed, both_ways), layer, jax.nn.relu)

        memory = rms_norm(_scan(encode, embedding[batch["source"]], params["encoder"]["layers"], policy), params["norms"][0])

        def decode(x: Array, layer: PyTree) -> Array:
            normed = rms_norm(x, layer["norms"][0])
            x = x + _attend(layer, 0, normed, normed, causal)
            x = x + _attend(layer, 1, rms_norm(x, layer["norms"][1]), memory, None)
            return _feed_forward(x, layer, jax.nn.relu)

        x = rms_norm(_scan(decode, embedding[batch["target"]], params["decoder"]["layers"], policy), params["norms"][1])
        return cross_entropy((x @ embedding.T * _WIDTH**-0.5).astype(jnp.float32), batch["next"])

    def batch(rows: int) -> PyTree:
        target = jax.ShapeDtypeStruct((rows, _TARGET), jnp.int32)
        return {"source": jax.ShapeDtypeStruct((rows, _SOURCE), jnp.int32), "target": target, "next": target}

    return Model(init, batch, train_step(loss, adamw()), rows=16)


def _init_layers(key: Array, layers: int, attentions: int) -> PyTree:
    """Return the layers, stacked, each with so many attentions."""

    def init(key: Array) -> PyTree:
        keys = jax.random.split(key, 4)
        shape = (attentions, _WIDTH, _HEADS, _HEAD)
        return {
            "qkv": jax.random.normal(keys[0], (3, *shape)) * _WIDTH**-0.5,
            "out": jax.random.normal(keys[1], (attentions, _HEADS, _HEAD, _WIDTH)) * _WIDTH**-0.5,
            "widen": normal(keys[2], _WIDTH, _HIDDEN),
            "narrow": normal(keys[3], _HIDDEN, _WIDTH),
            "norms": jnp.ones((attentions + 1, _WIDTH)),
        }

    return jax.vmap(init)(jax.random.split(key, layers))


def _scan(block: Block, x: Array, layers: PyTree, policy: str | None) -> Array:
    """Apply stacked layers."""

    def body(x: Array, layer: PyTree) -> tuple[Array, None]:
        return block(x, layer), None

    if policy is None:
        return jax.lax.scan(body, x, layers)[0]
    again = jax.checkpoint(body, prevent_cse=False, policy=getattr(jax.checkpoint_policies, policy))
    return jax.lax.scan(again, x, layers)[0]


def _attend(layer: PyTree, number: int, x: Array, memory: Array, bias: Array | None) -> Array:
    """Apply an attention of a layer: [B, T, D], [B, S, D], bias [heads, T, S] → [B, T, D]."""
    wq, wk, wv = layer["qkv"][:, number].astype(_DTYPE)
    query, key, value = (jnp.einsum("btd,dhk->bthk", each, w) for each, w in ((x, wq), (memory, wk), (memory, wv)))
    scores = jnp.einsum("bthk,bshk->bhts", query, key, preferred_element_type=jnp.float32) * _HEAD**-0.5
    weights = jax.nn.softmax(scores if bias is None else scores + bias).astype(_DTYPE)
    attended = jnp.einsum("bhts,bshk->bthk", weights, value)
    return jnp.einsum("bthk,hkd->btd", attended, layer["out"][number].astype(_DTYPE))


def _feed_forward(x: Array, layer: PyTree, activation: Callable[[Array], Any]) -> Array:
    hidden = activation(rms_norm(x, layer["norms"][-1]) @ layer["widen"].astype(_DTYPE))
    return x + hidden @ layer["narrow"].astype(_DTYPE)


def _bias(table: Array, length: int, causal: bool) -> Array:
    """Return the bias of each distance, in buckets that grow with it: table [buckets, heads] → [heads, T, T]."""
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None]
    signed = jnp.abs(distance) if not causal else jnp.maximum(distance, 0)
    half = _BUCKETS // (2 if causal else 4)
    far = half + jnp.log(jnp.maximum(signed, 1) / half) / jnp.log(_FAR / half) * half
    bucket = jnp.where(signed < half, signed, jnp.minimum(far.astype(jnp.int32), 2 * half - 1))
    bias = table[bucket if causal else bucket + 2 * half * (distance < 0)].transpose(2, 0, 1)
    return jnp.where(distance < 0, -jnp.inf, bias) if causal else bias
