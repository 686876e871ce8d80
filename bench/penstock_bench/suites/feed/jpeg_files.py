"""Write a folder of JPEG files that are like photos, and recognise them after they were decoded and resized.

The files have about 50 KB, 500x375 pixels and quality 90. Black and white squares in the middle of a photo encode its number, so
that delivered images can be identified.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

HEIGHT, WIDTH = 375, 500
CLASSES = 10
_BITS, _SQUARE = 12, 24
_PHOTOS = 4  # others are made of these by rolling and mirroring


def write_folder(folder: Path, files: int, seed: int) -> None:
    """Write `files` photos to `folder/class-c/NNNN.jpg`, where the class is the photo's number modulo `CLASSES`."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    photos = [_photo(rng) for _ in range(_PHOTOS)]
    for label in range(CLASSES):
        (folder / f"class-{label}").mkdir()
    for number in range(files):
        pixels = np.roll(photos[number % _PHOTOS], rng.integers(0, HEIGHT, 2), axis=(0, 1))
        pixels = pixels[:, ::-1].copy() if rng.random() < 0.5 else pixels
        _spell(pixels, number)
        Image.fromarray(pixels).save(folder / f"class-{number % CLASSES}" / f"{number:04d}.jpg", quality=90)


def _photo(rng: np.random.Generator) -> np.ndarray:
    """Return smooth noise of many scales, with a spectrum as photos have it, and the noise of a sensor."""
    from PIL import Image

    total = np.zeros((HEIGHT, WIDTH, 3), np.float32)
    for octave in range(2, 9):
        shape = (2**octave * HEIGHT // WIDTH + 1, 2**octave)
        for channel in range(3):
            noise = Image.fromarray(rng.standard_normal(shape, np.float32))
            total[..., channel] += np.asarray(noise.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)) * 2.0 ** (-0.95 * octave)
    total = 0.7 * total.mean(axis=-1, keepdims=True) + 0.3 * total  # colours of a photo vary less than its brightness
    total = 55 * (total - total.mean()) / total.std() + 120
    return np.clip(total + 5 * rng.standard_normal((HEIGHT, WIDTH, 1), np.float32), 0, 255).astype(np.uint8)


def _spell(pixels: np.ndarray, number: int) -> None:
    top, left = (HEIGHT - _SQUARE) // 2, (WIDTH - _BITS * _SQUARE) // 2
    for bit in range(_BITS):
        at = left + bit * _SQUARE
        pixels[top : top + _SQUARE, at : at + _SQUARE] = 255 * (number >> bit & 1)


def read_numbers(images: np.ndarray) -> np.ndarray:
    """Return the numbers that images spell: uint8 [B, S, S, 3], the central squares of photos, resized. Gives int64 [B]."""
    size = images.shape[1]
    centres = (np.arange(_BITS) + 0.5 - _BITS / 2) * _SQUARE * size / HEIGHT + size / 2
    return (images[:, size // 2, centres.astype(int), 1] > 127) @ (1 << np.arange(_BITS))


def resized_by_pillow(folder: Path, files: int, size: int) -> np.ndarray:
    """Return the central square of each photo as Pillow decodes and resizes it, uint8 [files, size, size, 3]."""
    from PIL import Image, ImageOps

    images = np.empty((files, size, size, 3), np.uint8)
    for number in range(files):
        with Image.open(folder / f"class-{number % CLASSES}" / f"{number:04d}.jpg") as image:
            images[number] = np.asarray(ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BILINEAR))
    return images
