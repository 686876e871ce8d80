"""Predict with Segment Anything: the masks of the object at a point of an image, from JPEG files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock_bench.suites.keras.batches import Batches
from penstock_bench.suites.keras.hub import as_keras_model
from penstock_bench.suites.keras.keras_setup import SEED
from penstock_bench.suites.keras.pictures import FILES, pictures
from penstock_bench.suites.keras.task import Job, Size

_PATCH = 16


@dataclass(frozen=True)
class _Shape:
    """The sizes of Segment Anything's parts.

    Attributes:
      global_layers: layers that attend to all patches, rather than to a window of `window` patches.
      embedding: channels of an encoded image.
    """

    image: int
    width: int
    depth: int
    heads: int
    global_layers: list[int]
    window: int
    embedding: int
    decoder_width: int


_SHAPES: Mapping[str, _Shape] = {
    "small": _Shape(256, 96, 4, 4, [1, 3], 7, 32, 64),
    # SAM base (Kirillov et al. 2023, arXiv:2304.02643).
    "full": _Shape(1024, 768, 12, 12, [2, 5, 8, 11], 14, 256, 2048),
}


def sam_job(size: Size) -> Job:
    shape = _SHAPES[size.geometry]
    files = pictures(shape.image)
    points = np.random.default_rng(SEED).uniform(0, shape.image, (FILES, 1, 2)).astype(np.float32)

    def make(number: int) -> Any:
        chosen = files.numbers(number, size.batch)
        # The model's documentation adds a second point to each point, which means "no box".
        return (
            {
                "images": files.images(chosen),
                "points": np.concatenate([points[chosen], np.zeros_like(points[chosen])], axis=1),
                "labels": np.tile(np.array([1, -1], np.float32), (size.batch, 1)),
                "boxes": np.zeros((size.batch, 0, 2, 2), np.float32),
                "masks": np.zeros((size.batch, 0, shape.image, shape.image, 1), np.float32),
            },
        )

    batches = Batches(size.steps, make)
    return Job(_segmenter(shape), {"x": batches}, batches)


def _segmenter(shape: _Shape) -> Any:
    import keras_hub

    image_encoder = keras_hub.models.ViTDetBackbone(
        hidden_size=shape.width,
        num_layers=shape.depth,
        intermediate_dim=4 * shape.width,
        num_heads=shape.heads,
        global_attention_layer_indices=shape.global_layers,
        image_shape=(shape.image, shape.image, 3),
        patch_size=_PATCH,
        num_output_channels=shape.embedding,
        window_size=shape.window,
    )
    prompt_encoder = keras_hub.layers.SAMPromptEncoder(
        hidden_size=shape.embedding,
        image_embedding_size=(shape.image // _PATCH,) * 2,
        input_image_size=(shape.image,) * 2,
        mask_in_channels=16,
    )
    mask_decoder = keras_hub.layers.SAMMaskDecoder(
        num_layers=2,
        hidden_size=shape.embedding,
        intermediate_dim=shape.decoder_width,
        num_heads=8,
        embedding_dim=shape.embedding,
        num_multimask_outputs=3,
        iou_head_depth=3,
        iou_head_hidden_dim=shape.embedding,
    )
    backbone = keras_hub.models.SAMBackbone(image_encoder, prompt_encoder, mask_decoder)
    model = as_keras_model(keras_hub.models.SAMImageSegmenter(backbone))
    model.compile(jit_compile=True)
    return model
