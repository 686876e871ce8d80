"""Configurations of diffusion transformers that make images from texts."""

from __future__ import annotations

from collections.abc import Mapping

from penstock_bench.suites.shard.hub.arrays import Floats, Same, Tokens
from penstock_bench.suites.shard.hub.configuration import Configuration, Nested

_LENGTH = 16
_STEPS = 4  # in which noise becomes an image
_TOKENS = Tokens((_LENGTH,), 512)
_CLIP = {
    "vocabulary_size": 512,
    "embedding_dim": 64,
    "hidden_dim": 64,
    "num_layers": 2,
    "num_heads": 8,
    "intermediate_dim": 256,
    "intermediate_output_index": -2,
    "max_sequence_length": _LENGTH,
}

DIFFUSION: Mapping[str, Configuration] = {
    "FluxBackbone": Configuration(
        {
            "input_channels": 64,
            "hidden_size": 128,
            "mlp_ratio": 4.0,
            "num_heads": 8,
            "depth": 2,
            "depth_single_blocks": 2,
            "axes_dim": [4, 6, 6],  # of a head
            "theta": 10_000,
            "use_bias": True,
            "guidance_embed": True,
            "image_shape": (16, 64),
            "text_shape": (_LENGTH, 64),
            "image_ids_shape": (16, 3),
            "text_ids_shape": (_LENGTH, 3),
            "y_shape": (64,),
        },
        {
            "image": Floats((16, 64), low=-1.0),
            # Row and column of each of 4 × 4 patches.
            "image_ids": Same([(0, row, column) for row in range(4) for column in range(4)], "float32"),
            "text": Floats((_LENGTH, 64), low=-1.0),
            "text_ids": Same([(0, 0, 0)] * _LENGTH, "float32"),
            "y": Floats((64,), low=-1.0),
            "timesteps": Floats(()),
            "guidance": Floats((), low=1.0, high=4.0),
        },
    ),
    "StableDiffusion3Backbone": Configuration(
        {
            "mmdit_patch_size": 2,
            "mmdit_hidden_dim": 64,
            "mmdit_num_layers": 2,
            "mmdit_num_heads": 8,
            "mmdit_position_size": 8,
            "mmdit_qk_norm": "rms_norm",
            "mmdit_dual_attention_indices": (0,),
            "vae": Nested(
                "vae.vae_backbone:VAEBackbone",
                {
                    "encoder_num_filters": [32] * 4,
                    "encoder_num_blocks": [1] * 4,
                    "decoder_num_filters": [32] * 4,
                    "decoder_num_blocks": [1] * 4,
                    "sampler_method": "mode",
                    "name": "vae",
                },
            ),
            "clip_l": Nested("clip.clip_text_encoder:CLIPTextEncoder", {**_CLIP, "name": "clip_l"}),
            "clip_g": Nested(
                "clip.clip_text_encoder:CLIPTextEncoder", {**_CLIP, "intermediate_activation": "gelu", "name": "clip_g"}
            ),
            "image_shape": (64, 64, 3),
        },
        {
            "images": Floats((64, 64, 3), low=-1.0),
            "latents": Floats((8, 8, 16), low=-1.0),
            "clip_l_token_ids": _TOKENS,
            "clip_l_negative_token_ids": _TOKENS,
            "clip_g_token_ids": _TOKENS,
            "clip_g_negative_token_ids": _TOKENS,
            "num_steps": Tokens((), _STEPS + 1, low=_STEPS),
            "guidance_scale": Floats((), low=7.0, high=7.5),
        },
        # Otherwise the step would, and cannot: the shape of the noise levels is the value of `num_steps`.
        calls={"scheduler.set_sigmas": (_STEPS,)},
    ),
}
