"""Whisper (Radford et al. 2022, arXiv:2212.04356) of transformers: a spectrogram is encoded, and a decoder writes its text.

The width and the six heads are from openai/whisper-tiny; layers, seconds and vocabulary are fewer.
"""

from __future__ import annotations

import numpy as np
from transformers import FlaxWhisperForConditionalGeneration, WhisperConfig

from penstock_bench.suites.shard.outside.batches import Batch, decoder_text
from penstock_bench.suites.shard.outside.training_transformers import token_loss, transformers_model
from penstock_bench.suites.shard.zoo.model import Layout, Model

_BATCH, _FRAMES, _TARGET = 16, 500, 64
_CONFIG = WhisperConfig(
    vocab_size=8192,
    num_mel_bins=80,
    d_model=384,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=6,
    decoder_attention_heads=6,
    encoder_ffn_dim=1536,
    decoder_ffn_dim=1536,
    max_source_positions=_FRAMES // 2,
    max_target_positions=_TARGET,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)

# Six heads cannot be shared by four or eight devices: attention is left replicated.
_LAYOUT: Layout = (
    ("fc1/kernel$", (None, "model")),
    ("fc1/bias$", ("model",)),
    ("fc2/kernel$", ("model", None)),
    ("embed_tokens/embedding$", ("model", None)),
)


def whisper() -> Model:
    model = FlaxWhisperForConditionalGeneration(_CONFIG, _do_init=False)
    return transformers_model("whisper", model, token_loss(model), _batch, _LAYOUT)


def _batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    frames = rng.standard_normal((_BATCH, _CONFIG.num_mel_bins, _FRAMES), np.float32)
    return {"input_features": frames, **decoder_text(rng, _BATCH, _TARGET, _CONFIG.vocab_size, start=1)}
