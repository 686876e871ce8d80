"""The article's data: a million records that are made when they are asked for, normal images with the index as a label."""

from __future__ import annotations

import numpy as np

from penstock.bench.suites.frameworks.weights import HostBatch

RECORDS = 1_000_000


class RandomImages:
    """A penstock `Source`: makes a batch at once, channels last."""

    def __init__(self, image: int, classes: int):
        self._image, self._classes = image, classes

    def __len__(self) -> int:
        return RECORDS

    def read(self, indices: np.ndarray) -> HostBatch:
        shape = (len(indices), self._image, self._image, 3)
        # Seeded by the indices: what a Loader reads twice must be the same twice.
        images = np.random.default_rng(indices).standard_normal(shape, np.float32)
        return HostBatch(images, (indices % self._classes).astype(np.int32))
