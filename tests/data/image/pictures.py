"""Pictures for tests: smooth noise of several scales, which is resized and compressed as a photo is."""

import io
from pathlib import Path

import numpy as np
from tests.extras import require


def natural(height, width, seed=0):
    """Return uint8 [height, width, 3]."""
    Image = require("PIL.Image")  # noqa: N806
    rng = np.random.default_rng(seed)
    total = np.zeros((height, width, 3), np.float32)
    for octave in range(1, 7):
        noise = rng.integers(0, 256, (2**octave, 2**octave, 3), np.uint8)
        total += np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)) * 0.6**octave
    total -= total.min()
    return (total * (255 / total.max())).astype(np.uint8)


def encode(pixels, format="JPEG", mode="RGB", **options):
    """Return the contents of a file."""
    Image = require("PIL.Image")  # noqa: N806
    file = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.convert(mode).save(file, format, **({"quality": 92} if format == "JPEG" else {}) | options)
    return file.getvalue()


def folder_of(root: Path, names, size=(40, 50)):
    """Write a JPEG of its own for each name, and return the folder."""
    for seed, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(natural(*size, seed)))
    return root
