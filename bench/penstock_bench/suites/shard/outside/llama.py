"""Llama (Touvron et al. 2023, arXiv:2302.13971) of transformers, with two query heads to a key.

The size is a quarter of TinyLlama's width (Zhang et al. 2024, arXiv:2401.02385), with fewer layers and tokens.
"""

from __future__ import annotations

from functools import partial

from transformers import FlaxLlamaForCausalLM, LlamaConfig

from penstock_bench.suites.shard.outside.batches import causal_text
from penstock_bench.suites.shard.outside.training_transformers import next_token_loss, transformers_model
from penstock_bench.suites.shard.zoo.model import Layout, Model

_BATCH, _LENGTH = 16, 128
_CONFIG = LlamaConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=_LENGTH,
)

MLP_LAYOUT: Layout = (
    ("(gate|up)_proj/kernel$", (None, "model")),
    ("down_proj/kernel$", ("model", None)),
    ("embed_tokens/embedding$", ("model", None)),
    ("lm_head/kernel$", (None, "model")),
)
_LAYOUT: Layout = (("(q|k|v)_proj/kernel$", (None, "model")), ("o_proj/kernel$", ("model", None)), *MLP_LAYOUT)


def llama() -> Model:
    model = FlaxLlamaForCausalLM(_CONFIG, input_shape=(1, _LENGTH), _do_init=False)
    batch = partial(causal_text, batch=_BATCH, length=_LENGTH, vocabulary=_CONFIG.vocab_size)
    return transformers_model("llama", model, next_token_loss(model), batch, _LAYOUT)
