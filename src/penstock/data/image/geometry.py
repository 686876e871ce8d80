"""Where the pixels of an image go: two sizes and a policy go in, a box of the image and a box of the result come out.

The orientation that a camera stores is read here, and applied here. Random boxes are those of the Inception networks (Szegedy et
al., 2015, section 6).
"""

from __future__ import annotations

import math
import struct
from typing import Literal, NamedTuple, get_args

import numpy as np

Fit = Literal["crop", "stretch", "pad"]
Size = tuple[int, int]  # height, width


class Box(NamedTuple):
    """A rectangle, in pixels. One in an image that is resized may begin and end inside of a pixel."""

    top: float
    left: float
    height: float
    width: float


def check_fit(fit: str) -> None:
    """Raise ValueError if there is no such policy."""
    if fit not in get_args(Fit):
        raise ValueError(f"fit={fit!r}: choose from {', '.join(get_args(Fit))}")


def place(image: Size, size: Size, fit: str) -> tuple[Box, Box]:
    """Return the box of the image that is scaled, and the box of the result that it fills, in complete pixels."""
    whole, target = Box(0, 0, *image), Box(0, 0, *size)
    if fit == "stretch":
        return whole, target
    ratios = image[0] / size[0], image[1] / size[1]
    if fit == "crop":
        height, width = size[0] * min(ratios), size[1] * min(ratios)
        return Box((image[0] - height) / 2, (image[1] - width) / 2, height, width), target
    rows, columns = (max(1, round(length / max(ratios))) for length in image)
    return whole, Box((size[0] - rows) // 2, (size[1] - columns) // 2, rows, columns)


def random_box(image: Size, rng: np.random.Generator, area: tuple[float, float]) -> Box:
    """Draw a box of the image with a random area, aspect ratio (3/4 to 4/3, logarithmic) and position.

    Args:
      image: height and width.
      rng: the random numbers.
      area: least and greatest area, as fractions of the image.

    Returns:
      The first of ten drawn boxes that lies inside of the image; else the greatest central box with an allowed aspect ratio.
    """
    height, width = image
    for _ in range(10):
        wanted = height * width * rng.uniform(*area)
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        h, w = round(math.sqrt(wanted / aspect)), round(math.sqrt(wanted * aspect))
        if 0 < h <= height and 0 < w <= width:
            return Box(int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w)
    height_of_box, width_of_box = min(height, width * 4 / 3), min(width, height * 4 / 3)
    return Box((height - height_of_box) / 2, (width - width_of_box) / 2, height_of_box, width_of_box)


def shrink_factor(box: Box, size: Size) -> int:
    """Return by how much a JPEG decoder may shrink the image so that the box still has at least the wanted size.

    Decoders shrink by 2, 4 and 8 for less than the work of a full decoding. Other factors take them longer than none.
    """
    largest = min(box.height / size[0], box.width / size[1])
    return next((factor for factor in (8, 4, 2) if factor <= largest), 1)


def turns(orientation: int) -> bool:
    """Return whether an orientation exchanges height and width."""
    return orientation >= 5


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Turn and mirror stored pixels [h, w, 3] so that they are seen upright. The result is a view."""
    if turns(orientation):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def jpeg_orientation(data: bytes) -> int:
    """Return the orientation 1 to 8 in the Exif segment of a JPEG; 1, which is upright, if there is none or it is damaged."""
    at = 2
    try:
        while data[at] == 0xFF and data[at + 1] != 0xDA:  # up to the start of the scan
            (length,) = struct.unpack_from(">H", data, at + 2)
            if data[at + 1] == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0":
                return _tiff_orientation(data[at + 10 : at + 2 + length])
            at += 2 + length
    except (struct.error, IndexError):
        pass
    return 1


def _tiff_orientation(tiff: bytes) -> int:
    order = "<" if tiff[:2] == b"II" else ">"
    (directory,) = struct.unpack_from(order + "I", tiff, 4)
    (entries,) = struct.unpack_from(order + "H", tiff, directory)
    for i in range(entries):
        tag, kind, count, value = struct.unpack_from(order + "HHIH", tiff, directory + 2 + 12 * i)
        if (tag, kind, count) == (0x0112, 3, 1):
            return value if 1 <= value <= 8 else 1
    return 1
