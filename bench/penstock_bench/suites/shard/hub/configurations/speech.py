"""Configurations of encoders of speech with a decoder of text."""

from __future__ import annotations

from collections.abc import Mapping

from penstock_bench.suites.shard.hub.arrays import Floats, Ones, Tokens
from penstock_bench.suites.shard.hub.configuration import Configuration

_SAMPLES = 16000  # one second, of which Moonshine's convolutions make 40 frames

SPEECH: Mapping[str, Configuration] = {
    "MoonshineBackbone": Configuration(
        {
            "vocabulary_size": 512,
            "filter_dim": 64,
            "encoder_num_layers": 2,
            "decoder_num_layers": 2,
            "hidden_dim": 64,
            "intermediate_dim": 64,
            "encoder_num_heads": 8,
            "decoder_num_heads": 8,
        },
        {
            "encoder_input_values": Floats((_SAMPLES, 1), low=-1.0),
            "encoder_padding_mask": Ones((_SAMPLES,), "bool"),
            "decoder_token_ids": Tokens((32,), 512),
            "decoder_padding_mask": Ones((32,), "bool"),
        },
    ),
    "WhisperBackbone": Configuration(
        {
            "vocabulary_size": 2048,
            "num_layers": 2,
            "num_heads": 8,
            "hidden_dim": 256,
            "intermediate_dim": 1024,
            "num_mels": 80,
            "max_encoder_sequence_length": 64,
            "max_decoder_sequence_length": 32,
        },
        {
            "encoder_features": Floats((64, 80), low=-1.0),
            "decoder_token_ids": Tokens((32,), 2048),
            "decoder_padding_mask": Ones((32,)),
        },
    ),
}
