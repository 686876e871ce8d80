"""ResNet-18 (He et al. 2016, arXiv:1512.03385) of Haiku: batch normalisation's averages are Haiku's state."""

from __future__ import annotations

from functools import partial
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from jax import Array

from penstock_bench.suites.shard.zoo.model import Model, PyTree
from penstock_bench.suites.shard.zoo.training import SEED, cross_entropy, pictures

_BATCH, _SIZE, _CLASSES = 16, 64, 1000


def resnet() -> Model:
    network: Any = hk.without_apply_rng(hk.transform_with_state(_logits))
    optimizer = optax.sgd(0.05, momentum=0.9, nesterov=True)

    def init() -> PyTree:
        params, averages = network.init(jax.random.PRNGKey(SEED), jnp.zeros((1, _SIZE, _SIZE, 3)))
        return {"params": params, "averages": averages, "optimizer": optimizer.init(params)}

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, Array]:
        def loss(params: PyTree) -> tuple[Array, PyTree]:
            logits, averages = network.apply(params, state["averages"], batch["images"])
            return cross_entropy(logits, batch["labels"]), averages

        (value, averages), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "averages": averages, "optimizer": moments}, value

    batch = partial(pictures, batch=_BATCH, size=_SIZE, channels=3, classes=_CLASSES)
    return Model("haiku-resnet", "Haiku", init, batch, step)


def _logits(images: Array) -> Array:
    """Classify images: [B, S, S, 3] → [B, classes]."""
    return hk.nets.ResNet18(_CLASSES)(images, is_training=True)
