"""RegNetY-200MF (Radosavovic et al. 2020, arXiv:2003.13678) of transformers: grouped convolutions and batch normalisation."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax import Array
from transformers import FlaxRegNetForImageClassification, RegNetConfig

from penstock_bench.suites.shard.outside.batches import Batch
from penstock_bench.suites.shard.zoo.model import Model, PyTree
from penstock_bench.suites.shard.zoo.training import SEED, cross_entropy, pictures
from penstock_bench.suites.shard.zoo.training_linen import create

_BATCH, _SIZE, _CLASSES = 16, 128, 1000
_CONFIG = RegNetConfig(
    embedding_size=32,
    hidden_sizes=[24, 56, 152, 368],
    depths=[1, 1, 4, 7],
    groups_width=8,
    layer_type="y",
    num_labels=_CLASSES,
)


class _State(TrainState):  # type: ignore[no-untyped-call]  # Flax's own, without annotations
    batch_stats: PyTree


def regnet() -> Model:
    model: Any = FlaxRegNetForImageClassification(_CONFIG, input_shape=(1, _SIZE, _SIZE, 3), _do_init=False)
    optimizer = optax.sgd(0.05, momentum=0.9, nesterov=True)

    def init() -> _State:
        return create(_State, model.module, optimizer, model.init_weights(jax.random.PRNGKey(SEED), model.input_shape))

    def step(state: Any, batch: PyTree) -> tuple[_State, Array]:
        def loss(params: PyTree) -> tuple[Array, PyTree]:
            variables = {"params": params, "batch_stats": state.batch_stats}
            outputs, updated = model(batch["pixel_values"], params=variables, train=True)
            return cross_entropy(outputs.logits, batch["labels"]), updated["batch_stats"]

        (value, batch_stats), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients, batch_stats=batch_stats), value

    return Model("regnet", "Linen", init, _batch, step)


def _batch(seed: int) -> Batch:
    batch = pictures(seed, batch=_BATCH, size=_SIZE, channels=3, classes=_CLASSES)
    return {"pixel_values": np.ascontiguousarray(batch["images"].transpose(0, 3, 1, 2)), "labels": batch["labels"]}
