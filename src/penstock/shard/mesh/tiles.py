"""Compute the bytes of an array in the memory of a TPU, which stores arrays in tiles of 8 × 128 elements.

The layout of an argument is the one with the least padding: any two dimensions may be the tiled ones. These rules were read from
the programs of the TPU compiler, whose sums of the bytes of arguments they give exactly.
"""

from __future__ import annotations

import functools
import itertools
import math

LANES, SUBLANES = 128, 8
"""Elements of a row of a tile, and its rows."""
_LONGEST_ROW = 1024  # elements of the largest tile of a vector


@functools.lru_cache(maxsize=1 << 16)
def tiled_bytes(shape: tuple[int, ...], element_bytes: int) -> int:
    """Return the bytes that an array takes in the memory of a TPU.

    Args:
      shape: the shape of the array on one device.
      element_bytes: bytes of an element.

    >>> tiled_bytes((1024, 256), 4) == 1024 * 256 * 4
    True
    >>> tiled_bytes((3, 3, 32, 32), 4) // (3 * 3 * 32 * 32 * 4)  # rows of 32 are padded to 128
    4
    """
    if 0 in shape:
        return 0
    if len(shape) < 2:
        length = math.prod(shape)
        tile = min(_LONGEST_ROW, max(LANES, 1 << (length - 1).bit_length()))
        return _round_up(length, tile) * element_bytes
    return element_bytes * min(_padded(math.prod(shape), *tiled) for tiled in itertools.permutations(shape, 2))


def keeps_order(shape: tuple[int, ...]) -> bool:
    """Return whether an array is stored with its last two dimensions as the tiled ones.

    Args:
      shape: the shape of the array on one device.

    >>> keeps_order((512, 1024)), keeps_order((512, 8)), keeps_order((512,))
    (True, False, True)
    """
    return 0 in shape or len(shape) < 2 or _padded(math.prod(shape), *shape[-2:]) <= tiled_bytes(shape, 1)


def _padded(elements: int, rows: int, columns: int) -> int:
    """Return the number of elements beside the tiled dimensions, times the padded tiled dimensions."""
    tile = _round_up(rows, min(SUBLANES, 1 << (rows - 1).bit_length())) * _round_up(columns, LANES)
    return elements // (rows * columns) * tile


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
