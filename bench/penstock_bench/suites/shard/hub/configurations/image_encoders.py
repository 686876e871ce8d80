"""Configurations of encoders of images: convolutional networks and vision transformers."""

from __future__ import annotations

from collections.abc import Mapping

from penstock_bench.suites.shard.hub.arrays import Floats
from penstock_bench.suites.shard.hub.configuration import Configuration

_SMALL = (32, 32, 3)
_LARGE = (64, 64, 3)
_TRANSFORMER = {"num_layers": 2, "hidden_dim": 64, "num_heads": 8}

IMAGE_ENCODERS: Mapping[str, Configuration] = {
    "CSPNetBackbone": Configuration(
        {
            "stem_filters": 16,
            "stem_kernel_size": 3,
            "stem_strides": 1,
            "stackwise_depth": [1, 2],
            "stackwise_strides": 2,
            "stackwise_num_filters": [64, 128],
            "block_type": "dark_block",
            "stage_type": "csp",
            "bottle_ratio": (0.5, 1.0),
            "block_ratio": (1.0, 0.5),
            "expand_ratio": (2.0, 1.0),
            "stem_padding": "same",
            "down_growth": True,
            "image_shape": _LARGE,
        },
        {"images": Floats(_LARGE)},
    ),
    "DINOV2Backbone": Configuration(
        {
            **_TRANSFORMER,
            "patch_size": 8,
            "intermediate_dim": 256,
            "num_register_tokens": 4,
            "use_swiglu_ffn": True,
            "image_shape": _LARGE,
            "position_embedding_shape": _LARGE,
        },
        {"images": Floats(_LARGE)},
    ),
    "DINOV3Backbone": Configuration(
        {**_TRANSFORMER, "patch_size": 8, "intermediate_dim": 256, "use_gated_mlp": True, "image_shape": _LARGE},
        {"pixel_values": Floats(_LARGE)},
    ),
    "DeiTBackbone": Configuration(
        {**_TRANSFORMER, "patch_size": 8, "intermediate_dim": 256, "image_shape": _LARGE},
        {"images": Floats(_LARGE)},
    ),
    "DenseNetBackbone": Configuration(
        {"stackwise_num_repeats": [2, 2, 2], "growth_rate": 16, "image_shape": _LARGE},
        {"images": Floats(_LARGE)},
    ),
    "EfficientNetBackbone": Configuration(
        {
            "stackwise_width_coefficients": [1.0] * 4,
            "stackwise_depth_coefficients": [1.0] * 4,
            "stackwise_kernel_sizes": [3, 3, 5, 3],
            "stackwise_num_repeats": [1, 2, 2, 2],
            "stackwise_input_filters": [16, 16, 32, 48],
            "stackwise_output_filters": [16, 32, 48, 64],
            "stackwise_expansion_ratios": [1, 4, 4, 4],
            "stackwise_squeeze_and_excite_ratios": [0.0, 0.0, 0.25, 0.25],
            "stackwise_strides": [1, 2, 2, 1],
            "stackwise_block_types": ["fused", "fused", "unfused", "unfused"],
            "stackwise_force_input_filters": [0] * 4,
            "stackwise_nores_option": [False] * 4,
            "num_features": 256,
            "input_shape": _LARGE,
        },
        {"images": Floats(_LARGE)},
    ),
    "HGNetV2Backbone": Configuration(
        {
            "depths": [1, 1],
            "embedding_size": 16,
            "hidden_sizes": [32, 64],
            "stem_channels": [3, 16, 16],
            "hidden_act": "relu",
            "use_learnable_affine_block": True,
            # Channels in, in the middle and out, blocks, layers of a block, and size of the kernel.
            "stackwise_stage_filters": [[16, 16, 32, 1, 2, 3], [32, 32, 64, 1, 2, 3]],
            "apply_downsample": [False, True],
            "use_lightweight_conv_block": [False, True],
            "image_shape": _LARGE,
        },
        {"images": Floats(_LARGE)},
    ),
    "MiTBackbone": Configuration(
        {
            "layerwise_depths": [2, 2],
            "num_layers": 2,
            "layerwise_num_heads": [4, 8],
            "layerwise_sr_ratios": [4, 2],
            "max_drop_path_rate": 0.1,
            "layerwise_patch_sizes": [7, 3],
            "layerwise_strides": [4, 2],
            "hidden_dims": [32, 64],
            "image_shape": _LARGE,
        },
        {"images": Floats(_LARGE)},
    ),
    "MobileNetBackbone": Configuration(
        {
            "stackwise_num_blocks": [2, 2],
            "stackwise_expansion": [[48, 64], [96, 128]],
            "stackwise_num_filters": [[16, 16], [32, 32]],
            "stackwise_kernel_size": [[3, 3], [5, 5]],
            "stackwise_num_strides": [[2, 1], [2, 1]],
            "stackwise_se_ratio": [[None, None], [0.25, 0.25]],
            "stackwise_activation": [["relu", "relu"], ["hard_swish", "hard_swish"]],
            "stackwise_padding": [[1, 1], [2, 2]],
            "input_num_filters": 16,
            "depthwise_filters": 16,
            "depthwise_stride": 2,
            "depthwise_residual": False,
            "last_layer_filter": 128,
            "output_num_filters": 256,
            "squeeze_and_excite": 0.5,
            "image_shape": _LARGE,
        },
        {"images": Floats(_LARGE)},
    ),
    # Gemma 3n's: residual blocks, inverted bottlenecks, and attention whose heads share keys and values.
    "MobileNetV5Backbone": Configuration(
        {
            "stackwise_block_types": [["er"], ["uir", "uir"], ["uir", "mqa"]],
            "stackwise_num_blocks": [1, 2, 2],
            "stackwise_num_filters": [[32], [48, 48], [64, 64]],
            "stackwise_strides": [[2], [2, 1], [2, 1]],
            "stackwise_act_layers": [["gelu"], ["gelu", "gelu"], ["gelu", "gelu"]],
            "stackwise_exp_ratios": [[4.0], [4.0, 4.0], [4.0, 0.0]],
            "stackwise_se_ratios": [[0.0], [0.0, 0.0], [0.0, 0.0]],
            "stackwise_dw_kernel_sizes": [[0], [5, 5], [5, 0]],
            "stackwise_dw_start_kernel_sizes": [[0], [3, 3], [3, 0]],
            "stackwise_dw_end_kernel_sizes": [[0], [0, 0], [0, 0]],
            "stackwise_exp_kernel_sizes": [[3], [0, 0], [0, 0]],
            "stackwise_pw_kernel_sizes": [[1], [0, 0], [0, 0]],
            "stackwise_num_heads": [[0], [0, 0], [0, 8]],
            "stackwise_key_dims": [[0], [0, 0], [0, 16]],
            "stackwise_value_dims": [[0], [0, 0], [0, 16]],
            "stackwise_kv_strides": [[0], [0, 0], [0, 1]],
            "stackwise_use_cpe": [[False], [False, False], [False, False]],
            "stem_size": 16,
            "num_features": 128,
            "msfa_output_resolution": 4,
            "image_shape": _LARGE,
        },
        {"images": Floats(_LARGE)},
    ),
    "ResNetBackbone": Configuration(
        {
            "input_conv_filters": [32],
            "input_conv_kernel_sizes": [7],
            "stackwise_num_filters": [64, 256],
            "stackwise_num_blocks": [2, 2],
            "stackwise_num_strides": [1, 2],
            "block_type": "bottleneck_block",
            "image_shape": _LARGE,
        },
        {"images": Floats(_LARGE)},
    ),
    "SwinTransformerBackbone": Configuration(
        {"image_shape": _LARGE, "embed_dim": 32, "depths": (2, 2), "num_heads": (4, 8), "window_size": 4},
        {"images": Floats(_LARGE)},
    ),
    "VGGBackbone": Configuration(
        {"stackwise_num_repeats": [2, 2, 2], "stackwise_num_filters": [32, 64, 128], "image_shape": _SMALL},
        {"images": Floats(_SMALL)},
    ),
    "ViTBackbone": Configuration(
        {**_TRANSFORMER, "hidden_dim": 256, "patch_size": 8, "mlp_dim": 1024, "image_shape": _LARGE},
        {"images": Floats(_LARGE)},
    ),
    "ViTDetBackbone": Configuration(
        {
            "hidden_size": 256,
            "num_layers": 2,
            "intermediate_dim": 1024,
            "num_heads": 8,
            "global_attention_layer_indices": [1],
            "patch_size": 8,
            "num_output_channels": 32,
            "window_size": 4,
            "image_shape": _LARGE,
        },
        {"images": Floats(_LARGE)},
    ),
    "XceptionBackbone": Configuration(
        {
            "stackwise_conv_filters": [[32, 64], [96, 96], [96, 96], [128, 128]],
            "stackwise_pooling": [False, True, False, False],
            "image_shape": _LARGE,
        },
        {"images": Floats(_LARGE)},
    ),
}
