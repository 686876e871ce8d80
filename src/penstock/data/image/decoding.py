"""Decode a JPEG, PNG, WebP, GIF, BMP or TIFF file to RGB pixels uint8 of a wanted size: `decode_image`.

JPEG is decoded by libjpeg-turbo (the package simplejpeg) and resized by OpenCV where both are installed. Pillow decodes all other
files, and those that libjpeg-turbo refuses. Both give the same photograph within a grey level or two on average.

A *box* is a rectangle of an image, or of the result. Random boxes are drawn as for the Inception networks (Szegedy et al., 2015,
section 6). The orientation that a camera stores is applied.
"""

from __future__ import annotations

import io
import math
import os
import struct
import threading
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from penstock._arguments import at_least

if TYPE_CHECKING:
    from PIL.Image import Image


Fit = Literal["crop", "stretch", "pad"]
Decoder = Literal["auto", "pil"]
Size = tuple[int, int]  # height, width


class Box(NamedTuple):
    """A rectangle, in pixels. One in an image that is resized may begin and end inside of a pixel."""

    top: float
    left: float
    height: float
    width: float


def decode_image(
    data: bytes,
    size: int | tuple[int, int],
    *,
    fit: Fit = "crop",
    rng: np.random.Generator | None = None,
    area: tuple[float, float] = (0.08, 1.0),
    decoder: Decoder = "auto",
) -> np.ndarray:
    """Decode an image and resize it, for a transform of your own.

    Pixels are averaged when an image becomes smaller, as Pillow's bilinear filter does. The orientation that a camera stored
    is applied. Grey images and CMYK become RGB, 16 bits become 8, and transparent pixels are blended over white. An animation
    gives its first frame. TIFF files with signed, 32-bit or floating-point pixels have no fixed scale, and are refused.

    Args:
      data: the contents of a JPEG, PNG, WebP, GIF, BMP or TIFF file.
      size: (height, width) of the result in pixels, or one number for both.
      fit: "crop" scales the image until it covers the size, and cuts off what is too much on both sides. "stretch" changes its
        aspect ratio. "pad" scales it until it lies inside of the size, and leaves the rest black.
      rng: a generator; instead of the centre, a random part of the image is cut out and stretched to the size: the random
        resized crop of ImageNet training, with aspect ratios from 3/4 to 4/3.
      area: least and greatest area of this part, as fractions of the image.
      decoder: "auto" takes simplejpeg and OpenCV where they are installed; "pil" takes Pillow alone. Photographs
        differ by a grey level or two on average, and single pixels of noise and sharp edges by far more.

    Returns:
      uint8 [height, width, 3].

    Raises:
      ValueError: the image is damaged, cut short, too large for Pillow's limit, or of a kind that is refused; or an argument is
        not allowed.
      TypeError: `data` is not bytes.
      ModuleNotFoundError: Pillow is not installed.

    Examples:
      >>> import io
      >>> from PIL import Image
      >>> file = io.BytesIO()
      >>> Image.new("RGB", (500, 375), "red").save(file, "PNG")
      >>> ps.decode_image(file.getvalue(), 224).shape
      (224, 224, 3)

      Training on random parts, of which half are mirrored:

      >>> def augment(record, rng):
      ...     image = ps.decode_image(record["image"], 224, rng=rng)
      ...     return {**record, "image": image[:, ::-1] if rng.random() < 0.5 else image}
      >>> loader = ps.Loader([{"image": file.getvalue()}] * 4, 2, transform=ps.per_record(augment), workers=2)
      >>> loader[0]["image"].shape
      (2, 224, 224, 3)
    """
    check_options(fit, decoder)
    if rng is not None and fit != "crop":
        raise ValueError(f"fit={fit!r} with rng: a random part is always stretched to the size; leave one of them out")
    if not 0 < area[0] <= area[1] <= 1:
        raise ValueError(f"area={area!r}: needs two fractions with 0 < least <= greatest <= 1")
    height, width = check_size(size)
    _check_bytes(data)
    out = np.empty((height, width, 3), np.uint8)
    try:
        decode_into(data, out, fit, decoder, rng, area)
    except UnreadableImageError as error:
        raise ValueError(f"data ({len(data):,} bytes) {error}") from error
    return out


class UnreadableImageError(Exception):
    """An image that cannot be decoded. The message continues a sentence about it: "is …"."""


def _check_bytes(data: Any) -> None:
    if isinstance(data, (bytes, bytearray, memoryview)):
        return
    if isinstance(data, (str, os.PathLike)):
        remedy = f"read the file first, with pathlib.Path({os.fspath(data)!r}).read_bytes()"
    elif hasattr(data, "dtype") or hasattr(data, "getpixel"):
        remedy = "pixels are decoded already, and only need to be resized; an array of a file's bytes has array.tobytes()"
    else:
        remedy = "a file has read()"
    raise TypeError(f"data is a {type(data).__name__}: decode_image needs the contents of an image file as bytes; {remedy}")


def _unreadable(error: Exception) -> UnreadableImageError:
    """Say why Pillow cannot read an image, and what to do."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
        return UnreadableImageError(
            f"is larger than Pillow allows, as a protection against files that are made to fill the memory: {error}. If you "
            "trust it, raise PIL.Image.MAX_IMAGE_PIXELS"
        )
    if isinstance(error, _NoScaleError):
        return UnreadableImageError(
            f"cannot become 8 bits a colour: its pixels are {error}, which have no fixed scale. Convert it, or decode it "
            "yourself: ps.images(..., size=None) gives the contents of files"
        )
    reason = "its format is not known" if isinstance(error, UnidentifiedImageError) else str(error)
    return UnreadableImageError(
        f"is not a complete image: {reason}. Was it cut short while it was copied? Copy it again, or leave it out"
    )


class _NoScaleError(Exception):
    """Pixels of a kind that has no least and greatest value."""


def check_size(size: int | tuple[int, int]) -> Size:
    """Return (height, width) of one number or two, which are >= 1."""
    if not isinstance(size, (tuple, list)):
        size = (size, size)
    if len(size) != 2:
        raise ValueError(f"size={size!r}: needs (height, width), or one number for both")
    return at_least(1, "size", size[0]), at_least(1, "size", size[1])


def check_options(fit: str, decoder: str) -> None:
    """Raise an error if there is no such policy or decoder, or Pillow is not installed."""
    if fit not in get_args(Fit):
        raise ValueError(f"fit={fit!r}: choose from {', '.join(get_args(Fit))}")
    if decoder not in get_args(Decoder):
        raise ValueError(f"decoder={decoder!r}: choose from {', '.join(get_args(Decoder))}")
    try:
        import PIL.Image  # noqa: F401 - only to see whether it is there
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('images need Pillow: pip install "penstock[images]"', name="PIL") from error


def decode_into(
    data: bytes,
    out: np.ndarray,
    fit: Fit,
    decoder: Decoder,
    rng: np.random.Generator | None = None,
    area: tuple[float, float] = (0.08, 1.0),
) -> None:
    """Decode an image into `out`, uint8 [height, width, 3], contiguous. Raise UnreadableImageError if it is not complete."""
    jpeg = data[:2] == b"\xff\xd8"
    fast = _fast_libraries() if jpeg and decoder == "auto" else None
    header = _header(fast, data) if fast else None
    opened = None
    if header is None:
        opened, orientation = _open(data, jpeg)
        image = opened.height, opened.width
    else:
        image, orientation = header, jpeg_orientation(data)
    size = (out.shape[1], out.shape[0]) if turns(orientation) else (out.shape[0], out.shape[1])  # as the image is stored
    box, inner = place(image, size, fit) if rng is None else (random_box(image, rng, area), Box(0, 0, *size))
    if turns(orientation):
        inner = Box(inner.left, inner.top, inner.width, inner.height)
    top, left, rows, columns = map(int, inner)
    # The view of `out` that is indexed as the stored pixels are: the inverse of `upright`.
    target = upright(out[top : top + rows, left : left + columns], {6: 8, 8: 6}.get(orientation, orientation))
    if target.size < out.size:
        out[:] = 0
    if fast is not None and opened is None and _decode_fast(fast, data, image, box, target):
        return
    target[:] = _decode_with_pillow(opened or _open(data, jpeg)[0], box, (target.shape[0], target.shape[1]))


def _open(data: bytes, jpeg: bool) -> tuple[Image, int]:
    """Open an image with Pillow, which reads its header; return it and its orientation."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data))
        # Pillow turns the pixels of a TIFF file by itself when it loads them.
        orientation = jpeg_orientation(data) if jpeg else image.getexif().get(0x0112, 1) if image.format != "TIFF" else 1
    except Exception as error:  # Pillow's readers raise OSError, SyntaxError, struct.error, KeyError and others
        raise _unreadable(error) from error
    return image, orientation if orientation in range(1, 9) else 1


def _decode_with_pillow(image: Image, box: Box, size: Size) -> np.ndarray:
    """Decode a box of the image, and resize it: uint8 [height, width, 3] as the image is stored."""
    from PIL import Image

    height, width = image.height, image.width
    factor = shrink_factor(box, size)
    try:
        image.draft("RGB", (width // factor, height // factor))  # JPEG only
        pixels = _rgb(image)
    except Exception as error:  # as for _open
        raise _unreadable(error) from error
    factor = factor if pixels.height < height else 1  # other formats are never shrunk
    corners = (box.left, box.top, box.left + box.width, box.top + box.height)
    most = (pixels.width, pixels.height) * 2
    left, top, right, bottom = (min(max(corner / factor, 0), end) for corner, end in zip(corners, most, strict=True))
    return np.asarray(pixels.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=(left, top, right, bottom)))


# Tags of TIFF 6.0, section 8 and 19.
_BITS, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339
_WHITE_IS_ZERO = 0


def _rgb(image: Image) -> Image:
    """Decode the pixels, and convert them to RGB."""
    from PIL import Image

    tags = getattr(image, "tag_v2", {})  # of TIFF
    kinds = set(tags.get(_SAMPLE_FORMAT, (1,)))
    if kinds != {1} or image.mode == "F" or (tags and image.mode == "I"):
        raise _NoScaleError({2: "signed integers", 3: "floating-point numbers"}.get(max(kinds), "integers of 32 bits"))
    if image.mode.startswith("I"):  # more than 8 bits a pixel, which Pillow would clip
        bits = tags.get(_BITS, (16,))[0]
        grey = (np.asarray(image).astype(np.int32) >> (bits - 8)).astype(np.uint8)
        return Image.fromarray(~grey if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO else grey).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


@cache
def _fast_libraries() -> tuple[Any, Any] | None:
    """Return the modules simplejpeg and cv2, or None if one of them is not installed."""
    try:
        import cv2
        import simplejpeg
    except ImportError:  # also where a system library that OpenCV needs is missing
        return None
    return simplejpeg, cv2


def _header(fast: tuple[Any, Any], data: bytes) -> Size | None:
    """Return height and width of a JPEG; None if Pillow has to decode it."""
    from PIL import Image

    try:
        height, width, colours, _ = fast[0].decode_jpeg_header(data)
    except ValueError:
        return None
    most = Image.MAX_IMAGE_PIXELS
    too_large = most is not None and height * width > most  # Pillow warns of it, or refuses it
    return None if too_large or colours not in ("YCbCr", "Gray", "RGB") else (height, width)


class _Scratch(threading.local):
    """Memory of one thread for intermediate pixels. New memory for each image would cost more than resizing it."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def get(self, name: str, length: int) -> np.ndarray:
        """Return uint8 [length] with any contents."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < length:
            buffer = self._buffers[name] = np.empty(length, np.uint8)
        return buffer[:length]


_scratch = _Scratch()


# Beyond this many pixels for each point, after shrinking, Pillow is faster: it computes no points but those that are wanted.
_LARGEST_SCALE = 4


def _decode_fast(fast: tuple[Any, Any], data: bytes, image: Size, box: Box, target: np.ndarray) -> bool:
    """Decode a box of a JPEG into the target, resized. Return whether that was possible without Pillow."""
    simplejpeg, cv2 = fast
    height, width = target.shape[:2]
    factor = shrink_factor(box, (height, width))
    if max(box.height / height, box.width / width) > _LARGEST_SCALE * factor:
        return False
    rows, columns = math.ceil(image[0] / factor), math.ceil(image[1] / factor)
    try:
        buffer = _scratch.get("decoded", rows * columns * 3)
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=rows, min_width=columns, min_factor=factor, buffer=buffer)
    except ValueError:  # damaged, or with a harmless fault that Pillow ignores
        return False
    top, bottom, down = _interval(box.top / factor, box.height / factor, rows, height)
    left, right, across = _interval(box.left / factor, box.width / factor, columns, width)
    pixels = pixels[top:bottom, left:right]
    if len(down) > 1 or len(across) > 1:
        smooth = _scratch.get("smooth", pixels.size).reshape(pixels.shape)
        pixels = cv2.sepFilter2D(pixels, -1, across, down, dst=smooth, borderType=cv2.BORDER_REPLICATE)
    if target.strides == (3 * width, 3, 1):
        cv2.resize(pixels, (width, height), dst=target, interpolation=cv2.INTER_LINEAR)
    else:
        target[:] = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_LINEAR)
    return True


def _interval(start: float, length: float, most: int, wanted: int) -> tuple[int, int, np.ndarray]:
    """Return the complete pixels nearest to an interval, and the filter to apply before `wanted` points of it are interpolated.

    The interval has a start and a length in pixels, of which there are `most`. The filter also corrects the difference between
    the centres of interval and pixels.
    """
    pixels = min(most, max(1, round(length)))
    first = min(most - pixels, round(start))
    end = first + pixels
    scale, shift = pixels / wanted, start + length / 2 - (first + end) / 2
    return first, end, _prefilter(round(scale * 32) / 32, round(shift * 16) / 16)  # few filters serve images of all sizes


@lru_cache(maxsize=4096)
def _prefilter(scale: float, shift: float) -> np.ndarray:
    """Return the filter that prevents aliasing when bilinear interpolation takes one pixel of each `scale`.

    Pillow weighs the pixels by a triangle around each point, whose half-width is `scale`, or 1 where an image becomes larger.
    OpenCV interpolates between the two nearest pixels, which is fast, but ignores the others. The filter is such that both steps
    together come nearest to the triangle, in the least squares over 16 positions of a point between two pixels.

    Args:
      scale: pixels for each point.
      shift: pixels from the interpolated point to the centre of the triangle.

    Returns:
      Coefficients float32 [2k + 1] with the sum 1: a single 1 if nothing needs to be filtered, three of them for a scale up to
      2 without a shift.
    """
    reach = math.ceil(max(scale, 1) + abs(shift)) - 1
    if reach == 0:
        return np.ones(1, np.float32)
    phase = np.arange(16)[:, None] / 16
    pixel = np.arange(-reach - 1, reach + 3)[None, :]
    wanted = np.maximum(0, 1 - np.abs(pixel - phase - shift) / max(scale, 1))
    wanted /= wanted.sum(axis=1, keepdims=True)
    moved = [np.maximum(0, 1 - np.abs(pixel - phase - i)).ravel() for i in range(-reach, reach + 1)]
    centre = moved.pop(reach)  # its coefficient is such that the sum is 1
    columns = np.stack(moved, axis=1) - centre[:, None]
    others = np.linalg.lstsq(columns, wanted.ravel() - centre, rcond=None)[0]
    return np.insert(others, reach, 1 - others.sum()).astype(np.float32)


# The boxes and the orientation of an image.


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

    The area is given by its least and greatest fraction of the image. The result is the first of ten drawn boxes that lies inside
    of the image; else the greatest central box with an allowed aspect ratio.
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
