"""Make the article's data: a million records, generated when they are read. An image is normal noise, the label its index."""

from __future__ import annotations

import numpy as np

from penstock_bench.suites.frameworks.weights import HostBatch

RECORDS = 1_000_000


class RandomImages:
    """A penstock `Source`, channels last."""

    def __init__(self, image: int, classes: int):
        self._image, self._classes = image, classes

    def __len__(self) -> int:
        return RECORDS

    def read(self, indices: np.ndarray) -> HostBatch:
        images = np.stack([normal(int(index), (self._image, self._image, 3)) for index in indices])
        return HostBatch(images, (indices % self._classes).astype(np.int32))


def normal(index: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the image of a record, float32. The numbers are always the same, and the work is the same in every framework."""
    return np.random.default_rng(index).standard_normal(shape, np.float32)
