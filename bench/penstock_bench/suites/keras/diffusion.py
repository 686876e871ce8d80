"""Train Stable Diffusion's diffusion transformer on the latents that its frozen autoencoder makes of JPEG files.

Keras Hub's own task for it cannot be trained (`fit` raises), but its parts can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock_bench.suites.keras.batches import Batches
from penstock_bench.suites.keras.keras_setup import SEED, jax, keras
from penstock_bench.suites.keras.pictures import FILES, pictures
from penstock_bench.suites.keras.task import Job, Size

_LATENT_CHANNELS = 16
_DOWN = 8  # pixels of an image to one of its latent, in each direction


@dataclass(frozen=True)
class _Shape:
    """The sizes of Stable Diffusion's parts.

    Attributes:
      filters, blocks: of the autoencoder's encoder, at each resolution.
      context, pooled: shapes of the two encodings of a text, which are made beforehand.
    """

    image: int
    filters: list[int]
    blocks: list[int]
    width: int
    depth: int
    heads: int
    position_size: int
    context: tuple[int, int]
    pooled: tuple[int]
    dtype: str


_SHAPES: Mapping[str, _Shape] = {
    "small": _Shape(64, [32] * 4, [1] * 4, 64, 1, 2, 8, (16, 64), (32,), "float32"),
    # Stable Diffusion 3 medium (Esser et al. 2024, arXiv:2403.03206) at 512 pixels.
    "full": _Shape(512, [128, 256, 512, 512], [2] * 4, 1536, 24, 24, 192, (154, 4096), (2048,), "mixed_bfloat16"),
}


class _FlowMatching(keras.Model):  # type: ignore[misc]  # Keras has no types
    """A model that gets a noisy image and its noise level, and predicts the direction of the noise."""

    def __init__(self, autoencoder: Any, diffuser: Any):
        super().__init__()
        self.autoencoder, self.diffuser = autoencoder, diffuser
        self.autoencoder.trainable = False
        self.seeds = keras.random.SeedGenerator(SEED)

    def call(self, inputs: Mapping[str, Any], training: bool = False) -> Any:
        """Return the error of the prediction, [B, height, width, channels]."""
        latents = (self.autoencoder.encode(inputs["images"]) - self.autoencoder.shift) * self.autoencoder.scale
        latents = jax.lax.stop_gradient(latents)
        noise = keras.random.normal(keras.ops.shape(latents), dtype=latents.dtype, seed=self.seeds)
        time = keras.random.uniform((keras.ops.shape(latents)[0], 1, 1, 1), dtype=latents.dtype, seed=self.seeds)
        predicted = self.diffuser(
            {
                "latent": (1 - time) * latents + time * noise,
                "context": inputs["context"],
                "pooled_projection": inputs["pooled"],
                "timestep": 1000 * time[:, 0, 0],
            },
            training=training,
        )
        return predicted - (noise - latents)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return keras.ops.mean(keras.ops.square(keras.ops.cast(y_pred, "float32")))


def diffusion_job(size: Size) -> Job:
    shape = _SHAPES[size.geometry]
    rng = np.random.default_rng(SEED)
    contexts = rng.standard_normal((FILES, *shape.context), np.float32)
    pooled = rng.standard_normal((FILES, *shape.pooled), np.float32)
    files = pictures(shape.image)

    def make(number: int) -> Any:
        chosen = files.numbers(number, size.batch)
        return ({"images": files.images(chosen), "context": contexts[chosen], "pooled": pooled[chosen]},)

    model = _FlowMatching(_autoencoder(shape), _diffuser(shape))
    model.compile(optimizer=keras.optimizers.AdamW(1e-4), jit_compile=True)
    batches = Batches(size.steps, make)
    return Job(model, {"x": batches}, batches)


def _autoencoder(shape: _Shape) -> Any:
    from keras_hub.src.models.vae.vae_backbone import VAEBackbone

    # Its decoder is built, and not used.
    return VAEBackbone(
        encoder_num_filters=shape.filters,
        encoder_num_blocks=shape.blocks,
        decoder_num_filters=[32],
        decoder_num_blocks=[1],
        sampler_method="mode",
        sample_channels=2 * _LATENT_CHANNELS,
        dtype=shape.dtype,
    )


def _diffuser(shape: _Shape) -> Any:
    from keras_hub.src.models.stable_diffusion_3.mmdit import MMDiT

    latent = shape.image // _DOWN
    return MMDiT(
        patch_size=2,
        hidden_dim=shape.width,
        num_layers=shape.depth,
        num_heads=shape.heads,
        position_size=shape.position_size,
        latent_shape=(latent, latent, _LATENT_CHANNELS),
        context_shape=shape.context,
        pooled_projection_shape=shape.pooled,
        dtype=shape.dtype,
    )
