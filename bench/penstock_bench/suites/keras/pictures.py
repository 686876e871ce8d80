"""Make JPEG files, and decode them when they are used."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock_bench.suites.frameworks import jpeg

FILES = 64


@dataclass(frozen=True)
class Pictures:
    """A folder of JPEG files, decoded batch by batch.

    Attributes:
      side: pixels that the images are resized to.
    """

    paths: list[str]
    side: int

    def numbers(self, batch: int, records: int) -> np.ndarray:
        """Return the numbers of a batch's files: consecutive, and from 0 again after the last file."""
        return np.arange(batch * records, (batch + 1) * records) % len(self.paths)

    def images(self, numbers: np.ndarray) -> np.ndarray:
        """Return decoded images, float32 [B, side, side, 3]."""
        return np.stack([jpeg.decode(self.paths[number], self.side) for number in numbers])


def pictures(side: int) -> Pictures:
    with jpeg.folder(FILES) as paths:  # the files stay, because the cache folder exists
        return Pictures(paths, side)
