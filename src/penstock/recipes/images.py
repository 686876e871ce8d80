"""The handwritten digits of the UCI repository, from scikit-learn: 1,797 images of 8×8 pixels with grey levels from 0 to 16."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from penstock.data.tree import Batch

TRAINING_IMAGES = 1437  # a constant, so that a batch size can be checked before scikit-learn is imported

_SPLIT_SEED = 0  # the same split for every run, so that their accuracies can be compared


class Split(NamedTuple):
    """The training and validation records, each as one batch: `image` uint8 [N, 8, 8, 1], `label` int32 [N]."""

    training: Batch
    validation: Batch


def load() -> Split:
    """Load the digits: four fifths for training and one fifth for validation, with the same share of each class."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    rows = np.arange(len(digits.target))
    training, validation = train_test_split(
        rows, train_size=TRAINING_IMAGES, random_state=_SPLIT_SEED, shuffle=True, stratify=digits.target
    )
    images, labels = digits.images.astype(np.uint8)[..., None], digits.target.astype(np.int32)
    return Split(*({"image": images[part], "label": labels[part]} for part in (training, validation)))


def shift(batch: Batch, rng: np.random.Generator) -> Batch:
    """Shift each image [B, H, W, 1] by -1, 0 or 1 pixel in both directions, and fill the border with background."""
    images = batch["image"]
    count, height, width, _ = images.shape
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    down, right = rng.integers(3, size=(2, count, 1))
    rows, columns = down + np.arange(height), right + np.arange(width)
    return {**batch, "image": padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]}


def scale(batch: Batch) -> Batch:
    """Scale grey levels from 0 to 16 to float32 from 0 to 1. It runs on the device, so that bytes are transferred."""
    return {**batch, "image": batch["image"].astype(jnp.float32) / 16}
