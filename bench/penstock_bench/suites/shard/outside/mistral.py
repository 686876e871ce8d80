"""Mistral (Jiang et al. 2023, arXiv:2310.06825) of transformers: attention to a window, three query heads to a key.

The layers are from SmolLM2-135M (Ben Allal et al. 2025, arXiv:2502.02737), fewer of them; its nine heads do not divide.
"""

from __future__ import annotations

from functools import partial

from transformers import FlaxMistralForCausalLM, MistralConfig

from penstock_bench.suites.shard.outside.batches import causal_text
from penstock_bench.suites.shard.outside.llama import MLP_LAYOUT
from penstock_bench.suites.shard.outside.training_transformers import next_token_loss, transformers_model
from penstock_bench.suites.shard.zoo.model import Model

_BATCH, _LENGTH = 16, 128
_CONFIG = MistralConfig(
    vocab_size=4096,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=2,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=_LENGTH,
    sliding_window=64,
)


def mistral() -> Model:
    model = FlaxMistralForCausalLM(_CONFIG, input_shape=(1, _LENGTH), _do_init=False)
    batch = partial(causal_text, batch=_BATCH, length=_LENGTH, vocabulary=_CONFIG.vocab_size)
    return transformers_model("mistral", model, next_token_loss(model), batch, MLP_LAYOUT)
