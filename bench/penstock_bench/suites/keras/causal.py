"""Train Gemma and Mistral to predict the next token of a text that is tokenised during training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from penstock_bench.suites.keras.batches import Batches
from penstock_bench.suites.keras.hub import as_keras_model
from penstock_bench.suites.keras.keras_setup import keras
from penstock_bench.suites.keras.task import Geometry, Job, Size
from penstock_bench.suites.keras.text import PAD, VOCABULARY, Corpus, corpus

_GEMMA: Mapping[str, Mapping[str, int]] = {
    "small": {
        "num_layers": 1,
        "num_query_heads": 2,
        "num_key_value_heads": 1,
        "hidden_dim": 64,
        "intermediate_dim": 512,
        "head_dim": 32,
    },
    # Gemma 2B (Gemma Team 2024, arXiv:2403.08295), but for the vocabulary.
    "full": {
        "num_layers": 18,
        "num_query_heads": 8,
        "num_key_value_heads": 1,
        "hidden_dim": 2048,
        "intermediate_dim": 32768,
        "head_dim": 256,
    },
}
_MISTRAL: Mapping[str, Mapping[str, int]] = {
    "small": {
        "num_layers": 1,
        "num_query_heads": 4,
        "num_key_value_heads": 2,
        "hidden_dim": 64,
        "intermediate_dim": 224,
        "sliding_window": 32,
    },
    # Mistral 7B (Jiang et al. 2023, arXiv:2310.06825), but for the vocabulary.
    "full": {
        "num_layers": 32,
        "num_query_heads": 32,
        "num_key_value_heads": 8,
        "hidden_dim": 4096,
        "intermediate_dim": 14336,
        "sliding_window": 4096,
    },
}
_LENGTHS = {"small": 64, "full": 512}  # tokens that are predicted
_LORA_RANK = 4


def gemma_job(size: Size) -> Job:
    import keras_hub

    models = keras_hub.models
    return _job(models.GemmaCausalLM, models.GemmaBackbone, _GEMMA, size)


def mistral_job(size: Size) -> Job:
    import keras_hub

    models = keras_hub.models
    return _job(models.MistralCausalLM, models.MistralBackbone, _MISTRAL, size)


def _job(model_class: Any, backbone_class: Any, geometries: Mapping[str, Mapping[str, int]], size: Size) -> Job:
    backbone = backbone_class(vocabulary_size=VOCABULARY, dtype=_dtype(size.geometry), **geometries[size.geometry])
    if size.geometry == "full":
        backbone.enable_lora(_LORA_RANK)  # Keras's guides fine-tune these models so on one device
    model = as_keras_model(model_class(backbone))
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-4),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=True,
    )
    batches = Batches(size.steps, partial(_tokenised, corpus(), size.batch, _LENGTHS[size.geometry]))
    return Job(model, {"x": batches}, batches)


def _dtype(geometry: Geometry) -> str:
    return {"small": "float32", "full": "bfloat16"}[geometry]


def _tokenised(texts: Corpus, records: int, length: int, number: int) -> Any:
    """Return (inputs, next tokens, weights), as a `CausalLMPreprocessor` gives them."""
    token_ids = texts.token_ids(number * records, records, length + 1)
    there = (token_ids != PAD).astype(np.int32)
    return {"token_ids": token_ids[:, :-1], "padding_mask": there[:, :-1]}, token_ids[:, 1:], there[:, 1:]
