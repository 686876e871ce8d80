"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) on a Llama whose own weights are frozen."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from penstock_bench.suites.shard.zoo import llama
from penstock_bench.suites.shard.zoo.model import Layout, Model, PyTree
from penstock_bench.suites.shard.zoo.training import SEED, adamw, cross_entropy, normal

_RANK, _ALPHA = 8, 16
_ADAPTED = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")
_SIZE = llama.Size()

# The rank is too small to split: an adapter follows its weight on the side of the model that the weight is split on.
_LAYOUT: Layout = (
    *(("base/.*" + pattern, spec) for pattern, spec in llama.LAYER_LAYOUT + llama.EMBEDDING_LAYOUT),
    ("w(q|_gate|_up)/b$", (None, "model")),
    ("w(o|_down)/a$", ("model", None)),
)


class _Adapted(NamedTuple):
    base: Array  # [in, out]
    a: Array  # [in, rank]
    b: Array  # [rank, out]


def lora() -> Model:
    optimizer = adamw()

    def init() -> PyTree:
        base = llama.init_params(_SIZE)
        adapters = _init_adapters(base)
        return {"base": base, "adapters": adapters, "optimizer": optimizer.init(adapters)}

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, Array]:
        base, adapters = state["base"], state["adapters"]
        value, gradients = jax.value_and_grad(_loss)(adapters, base, batch)
        updates, moments = optimizer.update(gradients, state["optimizer"], adapters)
        return {"base": base, "adapters": optax.apply_updates(adapters, updates), "optimizer": moments}, value

    return Model("lora", "JAX", init, partial(llama.batch, size=_SIZE), step, _LAYOUT)


def _init_adapters(base: PyTree) -> PyTree:
    keys = iter(jax.random.split(jax.random.key(SEED + 1), _SIZE.layers * len(_ADAPTED)))
    return [{name: _init_adapter(next(keys), layer[name]) for name in _ADAPTED} for layer in base["layers"]]


def _init_adapter(key: Array, weight: Array) -> PyTree:
    return {"a": normal(key, weight.shape[0], _RANK), "b": jnp.zeros((_RANK, weight.shape[1]))}


def _loss(adapters: PyTree, base: PyTree, batch: PyTree) -> Array:
    layers = [
        layer | {name: _Adapted(layer[name], **adapter) for name, adapter in adapted.items()}
        for layer, adapted in zip(base["layers"], adapters, strict=True)
    ]
    logits = llama.forward(base | {"layers": layers}, batch["tokens"], _SIZE, _linear)
    return cross_entropy(logits, batch["targets"])


def _linear(x: Array, weight: _Adapted) -> Array:
    return x @ weight.base + (x @ weight.a) @ weight.b * (_ALPHA / _RANK)
