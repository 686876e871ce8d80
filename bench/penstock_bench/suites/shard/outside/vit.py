"""The smallest published vision transformer, ViT-Ti/16 (Touvron et al. 2021, arXiv:2012.12877), of transformers.

It has three heads and 197 tokens, neither of which divides.
"""

from __future__ import annotations

import numpy as np
from jax import Array
from transformers import FlaxViTForImageClassification, ViTConfig

from penstock_bench.suites.shard.outside.batches import Batch
from penstock_bench.suites.shard.outside.training_transformers import logits_of, transformers_model
from penstock_bench.suites.shard.zoo.model import Layout, Model, PyTree
from penstock_bench.suites.shard.zoo.training import cross_entropy, pictures

_BATCH, _SIZE, _CLASSES = 16, 224, 1000
_CONFIG = ViTConfig(
    hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768, image_size=_SIZE, num_labels=_CLASSES
)

# Three heads cannot be shared by four or eight devices: attention is left replicated.
_LAYOUT: Layout = (
    ("intermediate/dense/kernel$", (None, "model")),
    ("intermediate/dense/bias$", ("model",)),
    (r"layer/\d+/output/dense/kernel$", ("model", None)),
)


def vit() -> Model:
    model = FlaxViTForImageClassification(_CONFIG, _do_init=False)

    def loss(params: PyTree, batch: PyTree, key: Array) -> Array:
        return cross_entropy(logits_of(model, params, batch, key), batch["labels"])

    return transformers_model("vit-tiny", model, loss, _batch, _LAYOUT)


def _batch(seed: int) -> Batch:
    batch = pictures(seed, batch=_BATCH, size=_SIZE, channels=3, classes=_CLASSES)
    return {"pixel_values": np.ascontiguousarray(batch["images"].transpose(0, 3, 1, 2)), "labels": batch["labels"]}
