"""Configurations of language models: decoders of text, with and without experts."""

from __future__ import annotations

from collections.abc import Mapping

from penstock_bench.suites.shard.hub.arrays import Array, Ones, Tokens
from penstock_bench.suites.shard.hub.configuration import Configuration

_VOCABULARY = 2048
_LENGTH = 32

_INPUTS: Mapping[str, Array] = {"token_ids": Tokens((_LENGTH,), _VOCABULARY), "padding_mask": Ones((_LENGTH,))}
_MULTI_HEAD = {"vocabulary_size": _VOCABULARY, "num_layers": 2, "num_heads": 8, "hidden_dim": 256, "intermediate_dim": 1024}
_GROUPED_QUERY = {
    "vocabulary_size": _VOCABULARY,
    "num_layers": 2,
    "num_query_heads": 8,
    "num_key_value_heads": 4,
    "hidden_dim": 256,
    "intermediate_dim": 1024,
}
_TIED = {"tie_word_embeddings": True}  # hidden states, which a backbone returns, do not depend on other output weights
_EXPERTS = {"num_experts": 8, "top_k": 2}
_DELTA_NET = {
    "vocabulary_size": _VOCABULARY,
    "num_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_query_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "hidden_dim": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

TEXT_DECODERS: Mapping[str, Configuration] = {
    "BloomBackbone": Configuration(_MULTI_HEAD, _INPUTS),
    "FalconBackbone": Configuration(
        {
            "vocabulary_size": _VOCABULARY,
            "num_layers": 2,
            "num_attention_heads": 8,
            "hidden_dim": 64,
            "intermediate_dim": 256,
        },
        _INPUTS,
    ),
    "GPT2Backbone": Configuration({**_MULTI_HEAD, "max_sequence_length": _LENGTH}, _INPUTS),
    "GPTNeoXBackbone": Configuration({**_MULTI_HEAD, "max_sequence_length": _LENGTH}, _INPUTS),
    # One head of keys and values, as Gemma 2B; otherwise Gemma 2's: norms after each block, soft caps and a sliding window.
    "GemmaBackbone": Configuration(
        {
            **_GROUPED_QUERY,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "use_post_ffw_norm": True,
            "use_post_attention_norm": True,
            "attention_logit_soft_cap": 50,
            "final_logit_soft_cap": 30,
            "use_sliding_window_attention": True,
            "sliding_window_size": 16,
        },
        _INPUTS,
    ),
    "GptOssBackbone": Configuration({**_GROUPED_QUERY, **_EXPERTS, "head_dim": 16, "sliding_window": 16}, _INPUTS),
    "Llama3Backbone": Configuration({**_GROUPED_QUERY, **_TIED}, _INPUTS),
    "LlamaBackbone": Configuration({**_GROUPED_QUERY, **_TIED}, _INPUTS),
    "MistralBackbone": Configuration({**_GROUPED_QUERY, "sliding_window": 16}, _INPUTS),
    "MixtralBackbone": Configuration({**_GROUPED_QUERY, **_EXPERTS, "sliding_window": 16}, _INPUTS),
    "OPTBackbone": Configuration({**_MULTI_HEAD, "max_sequence_length": _LENGTH}, _INPUTS),
    "Phi3Backbone": Configuration(
        {**_GROUPED_QUERY, "max_sequence_length": _LENGTH, "pretraining_sequence_length": _LENGTH}, _INPUTS
    ),
    "Qwen3Backbone": Configuration({**_GROUPED_QUERY, "head_dim": 16}, _INPUTS),
    "Qwen3MoeBackbone": Configuration(
        {**_GROUPED_QUERY, **_TIED, **_EXPERTS, "head_dim": 16, "moe_intermediate_dim": 128}, _INPUTS
    ),
    # Texts only: the vision encoder computes with the values of `image_grid_thw`, which a compiled step does not have.
    "Qwen3_5Backbone": Configuration({**_DELTA_NET, **_TIED, "intermediate_dim": 256}, _INPUTS),
    "Qwen3_5MoeBackbone": Configuration(
        {**_DELTA_NET, **_TIED, **_EXPERTS, "moe_intermediate_dim": 128, "shared_expert_intermediate_size": 128}, _INPUTS
    ),
    "QwenBackbone": Configuration(_GROUPED_QUERY, _INPUTS),
    "QwenMoeBackbone": Configuration(
        {**_GROUPED_QUERY, **_TIED, **_EXPERTS, "moe_intermediate_dim": 128, "shared_expert_intermediate_dim": 128}, _INPUTS
    ),
    "RWKV7Backbone": Configuration(
        {
            "vocabulary_size": _VOCABULARY,
            "num_layers": 2,
            "hidden_size": 64,
            "head_size": 8,
            "intermediate_dim": 256,
            "gate_lora": 32,
            "mv_lora": 16,
            "aaa_lora": 16,
            "decay_lora": 16,
        },
        _INPUTS,
    ),
    "SmolLM3Backbone": Configuration(
        {
            "vocabulary_size": _VOCABULARY,
            "num_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "hidden_dim": 64,
            "intermediate_dim": 256,
            "attention_bias": False,
            "attention_dropout": 0.0,
            # No rotary embedding in every fourth layer.
            "rope_layer_enabled_list": [True, True, True, False],
            "layer_types": ["attention"] * 4,
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-6,
            "max_position_embeddings": _LENGTH,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
        },
        _INPUTS,
    ),
}
