"""CLIP (Radford et al. 2021, arXiv:2103.00020) of transformers: every image of the batch is compared with every text.

The width is from TinyCLIP-ViT-8M-16-Text-3M (Wu et al. 2023, arXiv:2309.12314); layers and vocabulary are fewer.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from transformers import CLIPConfig, FlaxCLIPModel

from penstock_bench.suites.shard.outside.batches import Batch, masked_text
from penstock_bench.suites.shard.outside.training_transformers import transformers_model
from penstock_bench.suites.shard.zoo.model import Layout, Model, PyTree
from penstock_bench.suites.shard.zoo.training import pictures

_BATCH, _SIZE, _LENGTH, _VOCABULARY = 16, 224, 77, 16384
_PART = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
_CONFIG = CLIPConfig(
    text_config={**_PART, "vocab_size": _VOCABULARY, "num_hidden_layers": 3, "eos_token_id": 2},
    vision_config={**_PART, "image_size": _SIZE, "patch_size": 16, "num_hidden_layers": 4},
    projection_dim=512,
)

_LAYOUT: Layout = (
    ("self_attn/(q|k|v)_proj/kernel$", (None, "model")),
    ("self_attn/(q|k|v)_proj/bias$", ("model",)),
    ("self_attn/out_proj/kernel$", ("model", None)),
    ("fc1/kernel$", (None, "model")),
    ("fc1/bias$", ("model",)),
    ("fc2/kernel$", ("model", None)),
    ("token_embedding/embedding$", ("model", None)),
)


def clip() -> Model:
    model = FlaxCLIPModel(_CONFIG, _do_init=False)

    def loss(params: PyTree, batch: PyTree, key: Array) -> Array:
        outputs = model(**batch, params=params, dropout_rng=key, train=True)
        logits, labels = outputs.logits_per_image, jnp.arange(_BATCH)
        to_text = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        to_image = optax.softmax_cross_entropy_with_integer_labels(logits.T, labels)
        return (to_text.mean() + to_image.mean()) / 2

    return transformers_model("clip", model, loss, _batch, _LAYOUT)


def _batch(seed: int) -> Batch:
    texts = masked_text(seed, _BATCH, _LENGTH, _VOCABULARY, mask=0, masked=0.0)
    images = pictures(seed, batch=_BATCH, size=_SIZE, channels=3, classes=8)["images"]
    return {
        "input_ids": texts["input_ids"],
        "attention_mask": texts["attention_mask"],
        "pixel_values": np.ascontiguousarray(images.transpose(0, 3, 1, 2)),
    }
