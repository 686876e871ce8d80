"""Configurations of the models of the Gemma family that read images, and some of them sounds, together with texts."""

from __future__ import annotations

from collections.abc import Mapping

from penstock_bench.suites.shard.hub.arrays import Array, Floats, Marked, Ones, Same, Tokens
from penstock_bench.suites.shard.hub.configuration import Configuration, Nested
from penstock_bench.suites.shard.hub.configurations.text_encoders import T5_GEMMA, TWO_TEXTS

_VOCABULARY = 512
_LENGTH = 32
_RANDOM = Tokens((_LENGTH,), _VOCABULARY)
_TOKENS: Mapping[str, Array] = {"token_ids": _RANDOM}
_TEXT: Mapping[str, Array] = {**_TOKENS, "padding_mask": Ones((_LENGTH,))}
_GROUPED_QUERY = {
    "vocabulary_size": _VOCABULARY,
    "num_layers": 2,
    "num_query_heads": 8,
    "num_key_value_heads": 4,
    "hidden_dim": 64,
    "intermediate_dim": 256,
    "head_dim": 16,
}

# An image of 32 × 32 pixels is 8 × 8 patches, which are pooled to 16 tokens of the text.
_PATCHES = 8
_IMAGE_TOKENS = range(4, 20)
_IN_IMAGE = Same(int(position in _IMAGE_TOKENS) for position in range(_LENGTH))
_GEMMA3_VISION = {
    "image_size": 32,
    "patch_size": 4,
    "pool_size": 2,
    "num_layers": 2,
    "num_heads": 8,
    "hidden_dim": 64,
    "intermediate_dim": 256,
    "output_dim": 64,
}

# In a text of Gemma 3n: 4 tokens of an image, and 8 of a sound. Its vocabulary ends with 32 tokens for each of them.
_GEMMA3N_IMAGE, _GEMMA3N_SOUND = _VOCABULARY, _VOCABULARY + 32
_GEMMA3N_VISION = {
    "stackwise_block_types": [["er"], ["uir"], ["mqa"]],
    "stackwise_num_blocks": [1, 1, 1],
    "stackwise_num_filters": [[32], [64], [64]],
    "stackwise_strides": [[2], [2], [1]],
    "stackwise_act_layers": [["gelu"]] * 3,
    "stackwise_exp_ratios": [[4.0], [4.0], [0.0]],
    "stackwise_se_ratios": [[0.0]] * 3,
    "stackwise_dw_kernel_sizes": [[0], [5], [0]],
    "stackwise_dw_start_kernel_sizes": [[0], [3], [0]],
    "stackwise_dw_end_kernel_sizes": [[0]] * 3,
    "stackwise_exp_kernel_sizes": [[3], [0], [0]],
    "stackwise_pw_kernel_sizes": [[1], [0], [0]],
    "stackwise_num_heads": [[0], [0], [8]],
    "stackwise_key_dims": [[0], [0], [16]],
    "stackwise_value_dims": [[0], [0], [16]],
    "stackwise_kv_strides": [[0], [0], [1]],
    "stackwise_use_cpe": [[False]] * 3,
    "num_features": 64,
    "msfa_output_resolution": 2,
    "image_shape": (32, 32, 3),
}

GEMMA: Mapping[str, Configuration] = {
    "Gemma3Backbone": Configuration(
        {
            **_GROUPED_QUERY,
            "image_size": 32,
            "use_post_ffw_norm": True,
            "use_post_attention_norm": True,
            "use_sliding_window_attention": True,
            "sliding_window_size": 16,
            "vision_encoder": Nested("gemma3.gemma3_vision_encoder:Gemma3VisionEncoder", _GEMMA3_VISION),
        },
        {
            **_TEXT,
            "images": Floats((1, 32, 32, 3)),
            "vision_indices": Same(_IMAGE_TOKENS),
            "vision_mask": _IN_IMAGE,
        },
    ),
    "Gemma3nBackbone": Configuration(
        {
            "text_vocab_size": _VOCABULARY + 64,
            "text_hidden_size": 64,
            "num_hidden_layers": 2,
            "pad_token_id": 0,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "intermediate_size": [256, 256],
            "hidden_activation": "gelu_approximate",
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 16,
            "rope_theta": 10000.0,
            "max_position_embeddings": _LENGTH,
            "vocab_size_per_layer_input": _VOCABULARY,
            "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 2,
            "laurel_rank": 8,
            "vision_encoder_config": Nested("mobilenetv5.mobilenetv5_backbone:MobileNetV5Backbone", _GEMMA3N_VISION, True),
            "vision_hidden_size": 64,
            "vision_vocab_size": 32,
            "vision_vocab_offset": _GEMMA3N_IMAGE,
            "vision_soft_tokens_per_image": 4,
            "image_token_id": _GEMMA3N_IMAGE + 1,
            "audio_encoder_config": Nested(
                "gemma3n.gemma3n_audio_encoder:Gemma3nAudioEncoder",
                {
                    "hidden_size": 64,
                    "input_feat_size": 32,
                    "sscp_conv_channel_size": [16, 16],
                    "sscp_conv_kernel_size": [(3, 3), (3, 3)],
                    "sscp_conv_stride_size": [(2, 2), (2, 2)],
                    "sscp_conv_group_norm_eps": 1e-3,
                    "num_hidden_layers": 2,
                    "rms_norm_eps": 1e-6,
                    "gradient_clipping": 1e10,
                    "residual_weight": 0.5,
                    "num_attention_heads": 8,
                    "attention_chunk_size": 4,
                    "num_attention_context_right": 0,
                    "num_attention_context_left": 5,
                    "attention_logit_cap": 50.0,
                    "conv_kernel_size": 5,
                    "reduction_factor": 1,
                },
                True,
            ),
            "audio_hidden_size": 64,
            "audio_vocab_size": 32,
            "audio_vocab_offset": _GEMMA3N_SOUND,
            "audio_soft_tokens_per_image": 8,
            "audio_token_id": _GEMMA3N_SOUND + 1,
        },
        {
            "token_ids": Marked(
                _RANDOM,
                (
                    # A token before each says that it begins.
                    (3, 4, _GEMMA3N_IMAGE + 2),
                    (4, 8, _GEMMA3N_IMAGE + 1),
                    (11, 12, _GEMMA3N_SOUND + 2),
                    (12, 20, _GEMMA3N_SOUND + 1),
                ),
            ),
            "padding_mask": Ones((_LENGTH,), "bool"),
            "images": Floats((1, 32, 32, 3)),
            "input_features": Floats((1, 32, 32), low=-1.0),
            # The encoder takes True for padding.
            "input_features_mask": Same([[False] * 32], "bool"),
        },
    ),
    # An image, as patches, and a sound; a layer with a window and one without; inputs for each layer, and experts.
    "Gemma4Backbone": Configuration(
        {
            **_GROUPED_QUERY,
            "image_size": 32,
            "sliding_window_size": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 16,
            "enable_moe_block": True,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "expert_intermediate_dim": 64,
            "vision_encoder": Nested(
                "gemma4.gemma4_vision_encoder:Gemma4VisionEncoder",
                {
                    "image_size": 32,
                    "patch_size": 4,
                    "pool_size": 2,
                    "num_layers": 2,
                    "num_heads": 8,
                    "num_key_value_heads": 8,
                    "head_dim": 8,
                    "hidden_dim": 64,
                    "intermediate_dim": 256,
                    "output_dim": 64,
                    "position_embedding_size": _PATCHES,
                },
            ),
            "audio_encoder": Nested(
                "gemma4.gemma4_audio_encoder:Gemma4AudioEncoder",
                {
                    "input_feat_size": 32,
                    "hidden_size": 64,
                    "num_heads": 8,
                    "num_layers": 2,
                    "chunk_size": 4,
                    "context_left": 5,
                    "sscp_conv_channels": (16, 16),
                    "output_proj_dims": 64,
                    "output_dim": 64,
                },
            ),
            "num_audio_tokens_per_clip": 8,
        },
        {
            **_TEXT,
            "position_ids": Same(range(_LENGTH)),
            "pixel_values": Floats((1, _PATCHES**2, 3 * 4 * 4)),
            "pixel_position_ids": Same([[(column, row) for row in range(_PATCHES) for column in range(_PATCHES)]]),
            "vision_indices": Same(_IMAGE_TOKENS),
            "vision_mask": _IN_IMAGE,
            "audio_mel": Floats((1, 32, 32), low=-1.0),
            "audio_mel_mask": Ones((1, 32)),
            "audio_indices": Same(range(22, 30)),
            "audio_mask": Same(int(22 <= position < 30) for position in range(_LENGTH)),
        },
    ),
    "PaliGemmaBackbone": Configuration(
        {
            **_GROUPED_QUERY,
            "image_size": 32,
            "vit_patch_size": 8,
            "vit_num_heads": 8,
            "vit_hidden_dim": 64,
            "vit_num_layers": 2,
            "vit_intermediate_dim": 256,
        },
        {
            **_TEXT,
            "response_mask": Same(int(position >= _LENGTH // 2) for position in range(_LENGTH)),
            "images": Floats((32, 32, 3)),
        },
    ),
    "T5Gemma2Backbone": Configuration(
        {
            **T5_GEMMA,
            "eoi_token_index": _VOCABULARY - 1,
            "vision_encoder": Nested("gemma3.gemma3_vision_encoder:Gemma3VisionEncoder", _GEMMA3_VISION),
        },
        {
            **TWO_TEXTS,
            # The token after the image ends it.
            "encoder_token_ids": Marked(_RANDOM, ((_IMAGE_TOKENS.stop, _IMAGE_TOKENS.stop + 1, _VOCABULARY - 1),)),
            "images": Floats((1, 32, 32, 3)),
            "vision_indices": Same(_IMAGE_TOKENS),
        },
    ),
}
