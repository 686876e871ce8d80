"""BART (Lewis et al. 2020, arXiv:1910.13461) of transformers: an encoder and a decoder with learned positions.

The published sizes are too large for a CPU: this has half of them in width and depth, and a vocabulary of its own.
"""

from __future__ import annotations

from functools import partial

from transformers import BartConfig, FlaxBartForConditionalGeneration

from penstock_bench.suites.shard.outside.batches import text_pairs
from penstock_bench.suites.shard.outside.training_transformers import token_loss, transformers_model
from penstock_bench.suites.shard.zoo.model import Layout, Model

_BATCH, _SOURCE, _TARGET = 16, 128, 64
_CONFIG = BartConfig(
    vocab_size=4096,
    max_position_embeddings=256,
    d_model=384,
    encoder_layers=3,
    decoder_layers=3,
    encoder_attention_heads=8,
    decoder_attention_heads=8,
    encoder_ffn_dim=1536,
    decoder_ffn_dim=1536,
)

_LAYOUT: Layout = (
    ("attn/(q|k|v)_proj/kernel$", (None, "model")),
    ("attn/(q|k|v)_proj/bias$", ("model",)),
    ("attn/out_proj/kernel$", ("model", None)),
    ("fc1/kernel$", (None, "model")),
    ("fc1/bias$", ("model",)),
    ("fc2/kernel$", ("model", None)),
    ("shared/embedding$", ("model", None)),
)


def bart() -> Model:
    model = FlaxBartForConditionalGeneration(_CONFIG, _do_init=False)
    batch = partial(text_pairs, batch=_BATCH, source=_SOURCE, target=_TARGET, vocabulary=_CONFIG.vocab_size, start=2)
    return transformers_model("bart", model, token_loss(model), batch, _LAYOUT)
