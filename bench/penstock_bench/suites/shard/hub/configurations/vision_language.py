"""Configurations of models that read images or videos together with texts."""

from __future__ import annotations

from collections.abc import Mapping

from penstock_bench.suites.shard.hub.arrays import Array, Floats, Marked, Ones, Tokens
from penstock_bench.suites.shard.hub.configuration import Configuration, Nested

_VOCABULARY = 512
_LENGTH = 32
_RANDOM = Tokens((_LENGTH,), _VOCABULARY)
_TOKENS: Mapping[str, Array] = {"token_ids": _RANDOM}
_TEXT: Mapping[str, Array] = {**_TOKENS, "padding_mask": Ones((_LENGTH,))}

# Two towers, for images of 32 pixels and texts of 32 tokens.
_IMAGE_TOWER = {
    "patch_size": 8,
    "hidden_dim": 64,
    "num_layers": 2,
    "num_heads": 8,
    "intermediate_dim": 256,
    "image_shape": (32, 32, 3),
    "name": "vision_encoder",
}
_TEXT_TOWER = {
    "vocabulary_size": _VOCABULARY,
    "embedding_dim": 64,
    "hidden_dim": 64,
    "num_layers": 2,
    "num_heads": 8,
    "intermediate_dim": 256,
    "max_sequence_length": _LENGTH,
    "name": "text_encoder",
}


VISION_LANGUAGE: Mapping[str, Configuration] = {
    "BLIP2Backbone": Configuration(
        {
            "vision_encoder": Nested(
                "blip2.blip2_vision_encoder:BLIP2VisionEncoder",
                {
                    "image_size": 32,
                    "patch_size": 8,
                    "num_layers": 2,
                    "num_heads": 8,
                    "hidden_dim": 64,
                    "intermediate_dim": 256,
                    "use_patch_bias": True,
                    "use_class_token": True,
                    "use_mha_bias": True,
                    "use_mlp_bias": True,
                    "dropout_rate": 0.0,
                    "layer_norm_epsilon": 1e-6,
                    "initializer_range": 0.02,
                },
            ),
            "qformer": Nested(
                "blip2.blip2_qformer:BLIP2QFormer",
                {
                    "num_query_tokens": 8,
                    "num_layers": 2,
                    "num_heads": 8,
                    "hidden_dim": 64,
                    "intermediate_dim": 256,
                    "vision_dim": 64,
                    "cross_attention_frequency": 2,
                    "dropout": 0.1,
                    "layer_norm_epsilon": 1e-6,
                },
            ),
            "language_model": Nested(
                "blip2.blip2_custom_opt:BLIP2CustomOPT",
                {
                    "vocabulary_size": _VOCABULARY,
                    "num_layers": 2,
                    "num_heads": 8,
                    "hidden_dim": 64,
                    "intermediate_dim": 256,
                    "num_query_tokens": 8,
                    "qformer_hidden_dim": 64,
                    "max_sequence_length": 64,
                    "dropout": 0.1,
                },
            ),
        },
        {"images": Floats((32, 32, 3)), **_TEXT},
    ),
    "CLIPBackbone": Configuration(
        {
            "vision_encoder": Nested("clip.clip_vision_encoder:CLIPVisionEncoder", _IMAGE_TOWER),
            "text_encoder": Nested("clip.clip_text_encoder:CLIPTextEncoder", _TEXT_TOWER),
            "projection_dim": 64,
        },
        # The pooled token is the one of the highest id.
        {"images": Floats((32, 32, 3)), "token_ids": Marked(_RANDOM, ((_LENGTH - 1, _LENGTH, _VOCABULARY - 1),))},
    ),
    "MetaCLIP2Backbone": Configuration(
        {
            "vision_encoder": Nested("metaclip_2.metaclip_2_vision_encoder:MetaCLIP2VisionEncoder", _IMAGE_TOWER),
            "text_encoder": Nested("metaclip_2.metaclip_2_text_encoder:MetaCLIP2TextEncoder", _TEXT_TOWER),
            "projection_dim": 64,
        },
        # The pooled token is the first end of a text, whose id is 2.
        {
            "images": Floats((32, 32, 3)),
            "token_ids": Marked(Tokens((_LENGTH,), _VOCABULARY, low=3), ((_LENGTH - 1, _LENGTH, 2),)),
        },
    ),
    "PARSeqBackbone": Configuration(
        {
            "image_encoder": Nested(
                "vit.vit_backbone:ViTBackbone",
                {
                    "image_shape": (32, 64, 3),
                    "patch_size": (4, 8),
                    "num_layers": 2,
                    "num_heads": 8,
                    "hidden_dim": 64,
                    "mlp_dim": 256,
                    "use_class_token": False,
                    "name": "image_encoder",
                },
            ),
            "vocabulary_size": 104,
            "max_label_length": _LENGTH,
            "decoder_hidden_dim": 64,
            "num_decoder_layers": 2,
            "num_decoder_heads": 8,
            "decoder_mlp_dim": 256,
        },
        {"images": Floats((32, 64, 3)), "token_ids": Tokens((_LENGTH,), 104), "padding_mask": Ones((_LENGTH,))},
    ),
    "SigLIPBackbone": Configuration(
        {
            "vision_encoder": Nested("siglip.siglip_vision_encoder:SigLIPVisionEncoder", _IMAGE_TOWER),
            "text_encoder": Nested("siglip.siglip_text_encoder:SigLIPTextEncoder", _TEXT_TOWER),
        },
        {"images": Floats((32, 32, 3)), **_TOKENS},
    ),
    "VideoPrismBackbone": Configuration(
        {
            "num_frames": 4,
            "patch_size": 8,
            "hidden_dim": 64,
            "intermediate_dim": 256,
            "num_heads": 8,
            "num_spatial_layers": 2,
            "num_temporal_layers": 2,
            "num_auxiliary_layers": 1,
            "vocabulary_size": _VOCABULARY,
            "num_text_layers": 2,
            "attention_logit_soft_cap": 50.0,
            "image_shape": (32, 32, 3),
        },
        {**_TEXT, "pixel_values": Floats((4, 32, 32, 3))},
    ),
}
