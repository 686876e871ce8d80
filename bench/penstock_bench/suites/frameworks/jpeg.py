"""Write a folder of JPEG files, and decode one to a record by Pillow, which is the same work in every framework."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

RECORDS = 1_000_000
_SIDE = 256
# Mean and standard deviation of ImageNet's channels, the usual ones to normalise with.
_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
_STD = np.array([0.229, 0.224, 0.225], np.float32)


@contextlib.contextmanager
def folder(files: int) -> Iterator[list[str]]:
    """Write this many JPEG files, the same in every process, and yield their paths.

    If the environment variable PENSTOCK_BENCH_CACHE names a folder, they are written there once; otherwise, each time.
    """
    if cache := os.environ.get("PENSTOCK_BENCH_CACHE"):
        yield _made_once(Path(cache) / f"jpeg-{files}", files)
    else:
        with tempfile.TemporaryDirectory(prefix="penstock-jpeg-") as path:
            yield [_write(file, number) for number, file in enumerate(_paths(Path(path), files))]


def _made_once(folder: Path, files: int) -> list[str]:
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder.parent) as made:
            complete = Path(made) / "jpeg"
            complete.mkdir()
            for number, file in enumerate(_paths(complete, files)):
                _write(file, number)
            # A rename is atomic, so no process sees a part of the files. It fails if another process was faster; its files are
            # the same.
            with contextlib.suppress(OSError):
                complete.rename(folder)
    return [str(file) for file in _paths(folder, files)]


def _paths(folder: Path, files: int) -> list[Path]:
    return [folder / f"{number:04}.jpg" for number in range(files)]


def _write(path: Path, number: int) -> str:
    """Write a JPEG of gradients with noise, which has about as many bytes as a photograph of this size."""
    from PIL import Image

    rng = np.random.default_rng(number)
    columns = (np.arange(_SIDE) / _SIDE)[:, None]
    rows = columns[:, None]
    waves = np.sin(2 * np.pi * (rows * rng.uniform(0, 4, 3) + columns * rng.uniform(0, 4, 3) + rng.random(3)))
    pixels = 128 + 80 * waves + 12 * rng.standard_normal((_SIDE, _SIDE, 3))
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)
    return str(path)


def decode(path: str, image: int) -> np.ndarray:
    """Return a JPEG decoded, resized and normalised: float32 [image, image, 3]."""
    from PIL import Image

    with Image.open(path) as file:
        pixels = np.asarray(file.convert("RGB").resize((image, image), Image.Resampling.BILINEAR))
    return (pixels.astype(np.float32) / 255 - _MEAN) / _STD


class JpegRecords:
    """A penstock `Source` of a million records (path, label), which repeat the files, so that no epoch ends.

    `decode` makes an image of a path.
    """

    def __init__(self, paths: list[str], classes: int):
        self._paths, self._classes = np.array(paths), classes

    def __len__(self) -> int:
        return RECORDS

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._paths[indices % len(self._paths)], (indices % self._classes).astype(np.int32)
