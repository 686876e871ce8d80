"""Configurations of models that segment images, detect objects in them or estimate their depth."""

from __future__ import annotations

from collections.abc import Mapping

from penstock_bench.suites.shard.hub.arrays import Floats, Ones, Same, Tokens
from penstock_bench.suites.shard.hub.configuration import Configuration, Nested

_IMAGE = (64, 64, 3)
_PROMPT = 16  # tokens of the text that names what SAM 3 looks for
_RESNET = {
    "input_conv_filters": [64],
    "input_conv_kernel_sizes": [7],
    "stackwise_num_filters": [64, 64, 128, 128],
    "stackwise_num_blocks": [1, 1, 1, 1],
    "stackwise_num_strides": [1, 2, 2, 2],
    "block_type": "basic_block",
}

DENSE_PREDICTION: Mapping[str, Configuration] = {
    "BASNetBackbone": Configuration(
        {
            "image_encoder": Nested(
                "resnet.resnet_backbone:ResNetBackbone",
                _RESNET,
            ),
            "num_classes": 1,
            "projection_filters": 64,
            "image_shape": (32, 32, 3),
        },
        {"images": Floats((32, 32, 3))},
    ),
    "DFineBackbone": Configuration(
        {
            "backbone": Nested(
                "hgnetv2.hgnetv2_backbone:HGNetV2Backbone",
                {
                    "depths": [1, 1],
                    "embedding_size": 16,
                    "hidden_sizes": [32, 64],
                    "stem_channels": [3, 16, 16],
                    "hidden_act": "relu",
                    "use_learnable_affine_block": True,
                    "stackwise_stage_filters": [[16, 16, 32, 1, 1, 3], [32, 32, 64, 1, 1, 3]],
                    "apply_downsample": [False, True],
                    "use_lightweight_conv_block": [False, False],
                    "image_shape": _IMAGE,
                    "out_features": ["stage1", "stage2"],
                },
            ),
            "decoder_in_channels": [64, 64],
            "encoder_hidden_dim": 64,
            "num_labels": 8,
            "num_denoising": 16,
            "learn_initial_query": False,
            "num_queries": 16,
            "anchor_image_size": _IMAGE[:2],
            "feat_strides": [4, 8],
            "num_feature_levels": 2,
            "hidden_dim": 64,
            "encoder_in_channels": [32, 64],
            "encode_proj_layers": [1],
            "num_attention_heads": 8,
            "encoder_ffn_dim": 128,
            "num_encoder_layers": 1,
            "hidden_expansion": 0.5,
            "depth_multiplier": 0.34,
            "eval_idx": -1,
            "num_decoder_layers": 2,
            "decoder_attention_heads": 8,
            "decoder_ffn_dim": 128,
            "decoder_n_points": [2, 2],
            "lqe_hidden_dim": 16,
            "num_lqe_layers": 2,
            "out_features": ["stage1", "stage2"],
            "image_shape": _IMAGE,
            "seed": 0,
        },
        {"pixel_values": Floats(_IMAGE)},
    ),
    "DeepLabV3Backbone": Configuration(
        {
            "image_encoder": Nested(
                "resnet.resnet_backbone:ResNetBackbone",
                {
                    "input_conv_filters": [64],
                    "input_conv_kernel_sizes": [7],
                    "stackwise_num_filters": [64, 64, 128],
                    "stackwise_num_blocks": [1, 1, 1],
                    "stackwise_num_strides": [1, 2, 2],
                    "block_type": "basic_block",
                    "image_shape": _IMAGE,
                },
            ),
            "spatial_pyramid_pooling_key": "P4",
            "low_level_feature_key": "P2",
            "upsampling_size": 4,
            "dilation_rates": [2, 4, 6],
            "image_shape": _IMAGE,
        },
        {"images": Floats(_IMAGE)},
    ),
    "DepthAnythingBackbone": Configuration(
        {
            "image_encoder": Nested(
                "dinov2.dinov2_backbone:DINOV2Backbone",
                {
                    "patch_size": 14,
                    "num_layers": 4,
                    "hidden_dim": 64,
                    "num_heads": 8,
                    "intermediate_dim": 256,
                    "image_shape": (112, 112, 3),
                    "position_embedding_shape": (112, 112, 3),
                    "apply_layernorm": True,
                },
            ),
            "reassemble_factors": [4, 2, 1, 0.5],
            "neck_hidden_dims": [16, 32, 64, 128],
            "fusion_hidden_dim": 64,
            "head_hidden_dim": 32,
            "head_in_index": -1,
            "feature_keys": ["stage1", "stage2", "stage3", "stage4"],
        },
        {"images": Floats((112, 112, 3))},
    ),
    "RetinaNetBackbone": Configuration(
        {
            "image_encoder": Nested(
                "resnet.resnet_backbone:ResNetBackbone",
                {**_RESNET, "image_shape": (128, 128, 3)},
            ),
            "min_level": 3,
            "max_level": 7,
            "use_p5": False,
            "image_shape": (128, 128, 3),
        },
        {"images": Floats((128, 128, 3))},
    ),
    # For each image: a point of the object, one outside of it, a box and a mask.
    "SAMBackbone": Configuration(
        {
            "image_encoder": Nested(
                "vit_det.vit_det_backbone:ViTDetBackbone",
                {
                    "hidden_size": 64,
                    "num_layers": 2,
                    "intermediate_dim": 256,
                    "num_heads": 8,
                    "global_attention_layer_indices": [1],
                    "patch_size": 8,
                    "num_output_channels": 32,
                    "window_size": 4,
                    "image_shape": _IMAGE,
                },
            ),
            "prompt_encoder": Nested(
                "sam.sam_prompt_encoder:SAMPromptEncoder",
                {
                    "hidden_size": 32,
                    "image_embedding_size": (8, 8),
                    "input_image_size": (64, 64),
                    "mask_in_channels": 16,
                },
            ),
            "mask_decoder": Nested(
                "sam.sam_mask_decoder:SAMMaskDecoder",
                {
                    "num_layers": 2,
                    "hidden_size": 32,
                    "intermediate_dim": 128,
                    "num_heads": 8,
                    "embedding_dim": 32,
                    "num_multimask_outputs": 3,
                    "iou_head_depth": 3,
                    "iou_head_hidden_dim": 32,
                },
            ),
        },
        {
            "images": Floats(_IMAGE),
            "points": Floats((2, 2), high=64.0),
            "labels": Same([1, 0], "float32"),
            "boxes": Floats((1, 2, 2), high=64.0),
            "masks": Floats((1, 32, 32, 1)),
        },
        task="SAMImageSegmenter",
    ),
    # A text and a box for each image.
    "SAM3PromptableConceptBackbone": Configuration(
        {
            "vision_encoder": Nested(
                "sam3.sam3_vision_encoder:SAM3VisionEncoder",
                {
                    "image_shape": (56, 56, 3),
                    "patch_size": 14,
                    "num_layers": 2,
                    "hidden_dim": 64,
                    "intermediate_dim": 128,
                    "num_heads": 8,
                    "fpn_hidden_dim": 64,
                    "fpn_scale_factors": [4.0, 2.0, 1.0, 0.5],
                    "pretrain_image_shape": (28, 28, 3),
                    "window_size": 2,
                    "global_attn_indexes": [1],
                },
            ),
            "text_encoder": Nested(
                "sam3.sam3_text_encoder:SAM3TextEncoder",
                {
                    "vocabulary_size": 512,
                    "embedding_dim": 64,
                    "hidden_dim": 64,
                    "num_layers": 2,
                    "num_heads": 8,
                    "intermediate_dim": 128,
                    "max_sequence_length": _PROMPT,
                },
            ),
            "geometry_encoder": Nested(
                "sam3.sam3_geometry_encoder:SAM3GeometryEncoder",
                {"num_layers": 2, "hidden_dim": 64, "intermediate_dim": 128, "num_heads": 8, "roi_size": 7},
            ),
            "detr_encoder": Nested(
                "sam3.sam3_detr_encoder:SAM3DetrEncoder",
                {"num_layers": 2, "hidden_dim": 64, "intermediate_dim": 128, "num_heads": 8},
            ),
            "detr_decoder": Nested(
                "sam3.sam3_detr_decoder:SAM3DetrDecoder",
                {
                    "image_shape": (56, 56, 3),
                    "patch_size": 14,
                    "num_layers": 2,
                    "hidden_dim": 64,
                    "intermediate_dim": 128,
                    "num_heads": 8,
                    "num_queries": 16,
                },
            ),
            "mask_decoder": Nested(
                "sam3.sam3_mask_decoder:SAM3MaskDecoder",
                {"num_upsampling_stages": 3, "hidden_dim": 64, "num_heads": 8},
            ),
        },
        {
            "pixel_values": Floats((56, 56, 3)),
            "token_ids": Tokens((_PROMPT,), 512),
            "padding_mask": Ones((_PROMPT,), "bool"),
            # Centre, width and height, as parts of the image's.
            "boxes": Floats((1, 5), low=0.25, high=0.75),
            "box_labels": Ones((1,)),
        },
    ),
    "SegFormerBackbone": Configuration(
        {
            "image_encoder": Nested(
                "mit.mit_backbone:MiTBackbone",
                {
                    "layerwise_depths": [1, 1, 1, 1],
                    "num_layers": 4,
                    "layerwise_num_heads": [1, 2, 4, 8],
                    "layerwise_sr_ratios": [8, 4, 2, 1],
                    "max_drop_path_rate": 0.1,
                    "layerwise_patch_sizes": [7, 3, 3, 3],
                    "layerwise_strides": [4, 2, 2, 2],
                    "hidden_dims": [16, 32, 64, 128],
                    "image_shape": _IMAGE,
                },
            ),
            "projection_filters": 64,
        },
        {"images": Floats(_IMAGE)},
    ),
}
