"""The handwritten digits of the UCI repository that scikit-learn carries: 1,797 images of 8×8 grey levels, 0 to 16."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from penstock.data.tree import Batch

TRAINING_IMAGES = 1437  # known before scikit-learn is imported, to check a batch size against

_SPLIT_SEED = 0  # the same split for every run, so that their accuracies compare


class Split(NamedTuple):
    """Batches of all records: `image` uint8 [N, 8, 8, 1], `label` int32 [N]."""

    training: Batch
    validation: Batch


def load() -> Split:
    """The digits, four fifths to train on and one to validate on, each with the same share of every class."""
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
    """Move each image [B, H, W, 1] by -1, 0 or 1 pixel in both directions, and fill up with background."""
    images = batch["image"]
    count, height, width, _ = images.shape
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    down, right = rng.integers(3, size=(2, count, 1))
    rows, columns = down + np.arange(height), right + np.arange(width)
    return {**batch, "image": padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]}


def scale(batch: Batch) -> Batch:
    """Grey levels 0 to 16 → float32 from 0 to 1. Runs on the device, so that bytes cross the bus."""
    return {**batch, "image": batch["image"].astype(jnp.float32) / 16}
