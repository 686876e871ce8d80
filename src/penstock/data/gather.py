"""Batches gathered from several sources in memory, without a call for each source.

Sources with rows in memory go in; a reader of batches comes out, which finds the places of records and then copies them. That
takes some microseconds more than to read a single array, which matters for small batches. So small arrays are copied into one,
and places are found for many batches at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from penstock.data.row_blocks import RowBlocks
from penstock.data.source import Source
from penstock.data.tree import Batch


def gather_of(sources: Sequence[Source], copied: int) -> Gather | None:
    """Return a reader of several sources, whose record indices count through all of them.

    Args:
      sources: the sources. Those with a method `row_blocks`, which returns a pytree of `RowBlocks`, can be gathered from.
      copied: most bytes of arrays that are copied into one.

    Returns:
      The reader; None if the sources cannot be gathered from, or have different leaves.
    """
    trees = [blocks() for source in sources if (blocks := getattr(source, "row_blocks", None)) is not None]
    if len(trees) < len(sources) or any(tree is None for tree in trees):
        return None
    structures: list[Any] = [jax.tree_util.tree_structure(tree) for tree in trees]
    leaves = [[x.blocks for x in column] for column in zip(*map(jax.tree_util.tree_leaves, trees), strict=False)]
    columns = [[block for blocks in column for block in blocks] for column in leaves]
    if any(structure != structures[0] for structure in structures) or not all(map(_are_alike, columns)):
        return None
    return Gather([RowBlocks(blocks) for blocks in _copy_smallest(columns, copied)], structures[0])


def _are_alike(blocks: Sequence[np.ndarray]) -> bool:
    return len({(block.dtype, block.shape[1:]) for block in blocks}) == 1


def _copy_smallest(columns: Sequence[Sequence[np.ndarray]], most: int) -> list[Sequence[np.ndarray]]:
    """Replace the blocks of the smallest leaves, which have so many bytes together at most, by one array each.

    Memory maps stay where they are. So do windows, which would need more memory as a copy.
    """
    result, left = list(columns), most
    for number, blocks in sorted(enumerate(columns), key=lambda pair: sum(block.nbytes for block in pair[1])):
        left -= sum(block.nbytes for block in blocks)
        if left >= 0 and all(type(x) is np.ndarray and x.flags.c_contiguous and x.dtype.isnative for x in blocks):
            result[number] = [np.concatenate(blocks)]
    return result


class Gather:
    """A reader of batches from rows in memory.

    Args:
      columns: the rows of each leaf.
      structure: the structure of a batch.
    """

    def __init__(self, columns: Sequence[RowBlocks], structure: Any):
        self._columns, self._structure = columns, structure

    def places(self, indices: np.ndarray) -> list[np.ndarray]:
        """Return where the records at int64 [...] lie: for each leaf, an array of the same shape."""
        return [column.places(indices) for column in self._columns]

    def read(self, places: Sequence[np.ndarray]) -> Batch:
        """Return the batch of the records at these places, int64 [n] for each leaf."""
        leaves = [column.read(x) for column, x in zip(self._columns, places, strict=True)]
        return jax.tree_util.tree_unflatten(self._structure, leaves)
