"""A folder of JPEGs, and a record made of one: the same work in every framework, by Pillow."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

RECORDS = 1_000_000
_SIDE = 256
# Mean and standard deviation of ImageNet's channels, as everybody normalises with.
_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
_STD = np.array([0.229, 0.224, 0.225], np.float32)


@contextlib.contextmanager
def folder(files: int) -> Iterator[list[str]]:
    """A temporary folder of so many JPEGs, alike in every process: their paths."""
    with tempfile.TemporaryDirectory(prefix="penstock-jpeg-") as path:
        yield [_write(Path(path) / f"{number:04}.jpg", number) for number in range(files)]


def _write(path: Path, number: int) -> str:
    """Gradients in some directions under noise, which take about as many bytes as a photograph's patch of the size."""
    from PIL import Image

    rng = np.random.default_rng(number)
    columns = (np.arange(_SIDE) / _SIDE)[:, None]
    rows = columns[:, None]
    waves = np.sin(2 * np.pi * (rows * rng.uniform(0, 4, 3) + columns * rng.uniform(0, 4, 3) + rng.random(3)))
    pixels = 128 + 80 * waves + 12 * rng.standard_normal((_SIDE, _SIDE, 3))
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)
    return str(path)


def decode(path: str, image: int) -> np.ndarray:
    """Decoded, resized and normalised: float32 [image, image, 3]."""
    from PIL import Image

    with Image.open(path) as file:
        pixels = np.asarray(file.convert("RGB").resize((image, image), Image.Resampling.BILINEAR))
    return (pixels.astype(np.float32) / 255 - _MEAN) / _STD


class JpegRecords:
    """A million records over the files again and again, so that no epoch ends: (path, label) of each.

    A penstock `Source`, whose records `decoded` makes images of.
    """

    def __init__(self, paths: list[str], classes: int):
        self._paths, self._classes = np.array(paths), classes

    def __len__(self) -> int:
        return RECORDS

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._paths[indices % len(self._paths)], (indices % self._classes).astype(np.int32)
