"""Configurations of encoders of text, and of encoders with a decoder."""

from __future__ import annotations

from collections.abc import Mapping

from penstock_bench.suites.shard.hub.arrays import Array, Ones, Tokens
from penstock_bench.suites.shard.hub.configuration import Configuration

_VOCABULARY = 2048
_LENGTH = 32

_TOKENS: Mapping[str, Array] = {"token_ids": Tokens((_LENGTH,), _VOCABULARY)}
_SEGMENTS: Mapping[str, Array] = {"segment_ids": Tokens((_LENGTH,), 2, low=0)}
_MASK: Mapping[str, Array] = {"padding_mask": Ones((_LENGTH,))}
TWO_TEXTS: Mapping[str, Array] = {
    "encoder_token_ids": Tokens((_LENGTH,), _VOCABULARY),
    "encoder_padding_mask": Ones((_LENGTH,)),
    "decoder_token_ids": Tokens((_LENGTH,), _VOCABULARY),
    "decoder_padding_mask": Ones((_LENGTH,)),
}
_SIZES = {"vocabulary_size": _VOCABULARY, "num_layers": 2, "num_heads": 8, "hidden_dim": 256, "intermediate_dim": 1024}
T5_GEMMA = {
    "vocabulary_size": _VOCABULARY,
    "encoder_hidden_dim": 64,
    "encoder_intermediate_dim": 256,
    "encoder_num_layers": 2,
    "encoder_num_attention_heads": 8,
    "encoder_num_key_value_heads": 4,
    "encoder_head_dim": 16,
    "encoder_layer_types": ["sliding_attention", "full_attention"],
    "decoder_hidden_dim": 64,
    "decoder_intermediate_dim": 256,
    "decoder_num_layers": 2,
    "decoder_num_attention_heads": 8,
    "decoder_num_key_value_heads": 4,
    "decoder_head_dim": 16,
    "decoder_layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
    "cross_attention_hidden_size": 64,
}

TEXT_ENCODERS: Mapping[str, Configuration] = {
    "AlbertBackbone": Configuration(
        {**_SIZES, "embedding_dim": 32, "max_sequence_length": _LENGTH}, {**_TOKENS, **_SEGMENTS, **_MASK}
    ),
    "BartBackbone": Configuration({**_SIZES, "max_sequence_length": _LENGTH}, TWO_TEXTS),
    "BertBackbone": Configuration({**_SIZES, "max_sequence_length": _LENGTH}, {**_TOKENS, **_SEGMENTS, **_MASK}),
    "DebertaV3Backbone": Configuration(
        {**_SIZES, "max_sequence_length": _LENGTH, "bucket_size": 16},
        {**_TOKENS, **_MASK},
    ),
    "DistilBertBackbone": Configuration({**_SIZES, "max_sequence_length": _LENGTH}, {**_TOKENS, **_MASK}),
    "ESMBackbone": Configuration({**_SIZES, "max_sequence_length": _LENGTH}, _TOKENS),
    "EdRecBackbone": Configuration(
        {
            "vocab_size": _VOCABULARY,
            "num_layers_enc": 2,
            "num_layers_dec": 2,
            "hidden_dim": 64,
            "intermediate_dim": 256,
            "num_heads": 8,
        },
        {
            **TWO_TEXTS,
            "encoder_padding_mask": Ones((_LENGTH,), "bool"),
            "decoder_padding_mask": Ones((_LENGTH,), "bool"),
        },
    ),
    "ElectraBackbone": Configuration(
        {
            "vocab_size": _VOCABULARY,
            "num_layers": 2,
            "num_heads": 8,
            "hidden_dim": 64,
            "embedding_dim": 32,
            "intermediate_dim": 256,
            "max_sequence_length": _LENGTH,
        },
        {**_TOKENS, **_SEGMENTS, **_MASK},
    ),
    "FNetBackbone": Configuration(
        {
            "vocabulary_size": _VOCABULARY,
            "num_layers": 2,
            "hidden_dim": 64,
            "intermediate_dim": 256,
            "max_sequence_length": _LENGTH,
        },
        {**_TOKENS, **_SEGMENTS},
    ),
    "RobertaBackbone": Configuration({**_SIZES, "max_sequence_length": _LENGTH}, {**_TOKENS, **_MASK}),
    "RoformerV2Backbone": Configuration({**_SIZES, "head_size": 32}, {**_TOKENS, **_SEGMENTS}),
    "T5Backbone": Configuration(_SIZES, TWO_TEXTS),
    "T5GemmaBackbone": Configuration({**T5_GEMMA, "attn_logit_softcapping": 50.0}, TWO_TEXTS),
    "XLMRobertaBackbone": Configuration({**_SIZES, "max_sequence_length": _LENGTH}, {**_TOKENS, **_MASK}),
    "XLNetBackbone": Configuration(_SIZES, {**_TOKENS, **_SEGMENTS, **_MASK}),
}
