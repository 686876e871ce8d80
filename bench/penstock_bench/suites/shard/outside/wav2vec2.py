"""wav2vec 2.0 (Baevski et al. 2020, arXiv:2006.11477) of transformers, with convolutions over the samples and a CTC loss.

Width, depth and convolutions have a third to a half of the base model's size.
"""

from __future__ import annotations

import numpy as np
import optax
from jax import Array
from transformers import FlaxWav2Vec2ForCTC, Wav2Vec2Config

from penstock_bench.suites.shard.outside.batches import Batch
from penstock_bench.suites.shard.outside.training_transformers import logits_of, transformers_model
from penstock_bench.suites.shard.zoo.model import Layout, Model, PyTree

_BATCH, _SAMPLES, _LETTERS = 16, 16_000, 24
# The layer norms are the ones that the Flax model has; it has no group norm, the base model's.
_CONFIG = Wav2Vec2Config(
    vocab_size=32,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=1024,
    conv_dim=(256,) * 7,
    feat_extract_norm="layer",
    do_stable_layer_norm=True,
    pad_token_id=0,
)

_LAYOUT: Layout = (
    ("(q|k|v)_proj/kernel$", (None, "model")),
    ("(q|k|v)_proj/bias$", ("model",)),
    ("out_proj/kernel$", ("model", None)),
    ("intermediate_dense/kernel$", (None, "model")),
    ("intermediate_dense/bias$", ("model",)),
    ("output_dense/kernel$", ("model", None)),
)


def wav2vec2() -> Model:
    model = FlaxWav2Vec2ForCTC(_CONFIG, _do_init=False)

    def loss(params: PyTree, batch: PyTree, key: Array) -> Array:
        logits = logits_of(model, params, {"input_values": batch["input_values"]}, key)
        losses = optax.ctc_loss(logits, np.zeros(logits.shape[:2], np.float32), batch["labels"], batch["label_paddings"])
        return losses.mean()

    return transformers_model("wav2vec2", model, loss, _batch, _LAYOUT)


def _batch(seed: int) -> Batch:
    """Return samples [B, samples] and letters [B, letters], of which the last ones are padding; 0 is CTC's blank."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(_LETTERS // 2, _LETTERS + 1, size=(_BATCH, 1))
    return {
        "input_values": rng.standard_normal((_BATCH, _SAMPLES), np.float32),
        "labels": rng.integers(1, _CONFIG.vocab_size, size=(_BATCH, _LETTERS), dtype=np.int32),
        "label_paddings": (np.arange(_LETTERS) >= lengths).astype(np.float32),
    }
