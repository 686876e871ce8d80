"""Train a BERT classifier: on text that is tokenised during training, and on tokens in a large file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock_bench.suites.keras.batches import Batches
from penstock_bench.suites.keras.cache import made_once
from penstock_bench.suites.keras.hub import as_keras_model
from penstock_bench.suites.keras.keras_setup import SEED, keras
from penstock_bench.suites.keras.task import Job, Size
from penstock_bench.suites.keras.text import PAD, VOCABULARY, Corpus, corpus

_BACKBONES: Mapping[str, Mapping[str, int]] = {
    "small": {"num_layers": 2, "num_heads": 2, "hidden_dim": 64, "intermediate_dim": 256, "max_sequence_length": 64},
    # BERT base (Devlin et al. 2018, arXiv:1810.04805), but for the vocabulary.
    "full": {"num_layers": 12, "num_heads": 12, "hidden_dim": 768, "intermediate_dim": 3072, "max_sequence_length": 512},
}
_LENGTHS = {"small": 64, "full": 256}  # tokens of a record
_CLASSES = 4

_FILE = 2_200_000_000  # bytes
_TOKEN = np.dtype(np.int32)
_DOCUMENTS = 8192


def fit_job(size: Size) -> Job:
    texts = corpus()

    def make(number: int) -> Any:
        token_ids = _token_ids(texts, size, number)
        return _inputs(token_ids), _labels(token_ids)

    batches = Batches(size.steps, make)
    return Job(_classifier(size), {"x": batches}, batches)


def predict_job(size: Size) -> Job:
    texts = corpus()
    batches = Batches(size.steps, lambda number: (_inputs(_token_ids(texts, size, number)),))
    return Job(_classifier(size), {"x": batches}, batches)


def memmap_job(size: Size) -> Job:
    length = _LENGTHS[size.geometry]
    file, starts = _token_file(corpus(), length)
    order = np.random.default_rng(SEED).permutation(starts)

    def make(number: int) -> Any:
        chosen = order[np.arange(number * size.batch, (number + 1) * size.batch) % len(order)]
        token_ids = np.asarray(file[chosen[:, None] + np.arange(length)])
        return _inputs(token_ids), _labels(token_ids)

    batches = Batches(size.steps, make)
    return Job(_classifier(size), {"x": batches}, batches)


def _classifier(size: Size) -> Any:
    import keras_hub

    backbone = keras_hub.models.BertBackbone(vocabulary_size=VOCABULARY, **_BACKBONES[size.geometry])
    model = as_keras_model(keras_hub.models.BertTextClassifier(backbone, num_classes=_CLASSES))
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-4),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=True,
    )
    return model


def _token_ids(texts: Corpus, size: Size, number: int) -> np.ndarray:
    return texts.token_ids(number * size.batch, size.batch, _LENGTHS[size.geometry])


def _inputs(token_ids: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "token_ids": token_ids,
        "padding_mask": (token_ids != PAD).astype(np.int32),
        "segment_ids": np.zeros_like(token_ids),
    }


def _labels(token_ids: np.ndarray) -> np.ndarray:
    """Return labels that depend on the record, so that there is something to learn."""
    return token_ids[:, 1] % _CLASSES


def _token_file(texts: Corpus, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Write a sparse file with documents at many positions, whose gaps take no disk space; return it and the starts."""
    starts = np.arange(_DOCUMENTS) * (_FILE // _TOKEN.itemsize // _DOCUMENTS)

    def write(path: Path) -> None:
        tokens = np.memmap(path, _TOKEN, "w+", shape=(_FILE // _TOKEN.itemsize,))
        tokens[starts[:, None] + np.arange(length)] = texts.token_ids(0, _DOCUMENTS, length)
        tokens.flush()

    return np.memmap(made_once(f"tokens-{length}.bin", write), _TOKEN, "r"), starts
