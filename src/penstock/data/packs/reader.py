"""Packs, read by their index: tokens, segment ids and positions.

The numbers of packs go in; a batch comes out. It is one gather of tokens, and no Python code runs for each token or piece.
"""

from __future__ import annotations

import numpy as np

from penstock.data.packs.documents import PieceReader
from penstock.data.packs.index import PackIndex
from penstock.data.tree import Batch


class PackReader:
    """A reader of packs.

    Attributes:
      documents: the documents.
      index: the pieces of each pack.
      length: tokens in a pack.
      dtype: of the tokens.
      values: the token that fills a pack up, "padding", and the one that ends a document, "eos", if there is one.
    """

    def __init__(self, documents: PieceReader, index: PackIndex, length: int, dtype: np.dtype, values: dict[str, int]):
        self.documents, self.index, self.length, self.dtype, self.values = documents, index, length, dtype, values
        self._has_eos = "eos" in values

    def __len__(self) -> int:
        """Return the number of packs."""
        return len(self.index.starts) - 1

    def read(self, indices: np.ndarray) -> Batch:
        """Return tokens, segment ids and positions, each [n, length], of the packs at int64 [n]."""
        pieces, sizes, segments = self._pieces(indices)
        ends = np.cumsum(sizes)
        heads = ends - sizes  # the place of each piece in the batch
        shape = (len(indices), self.length)
        segment_ids = segments.astype(np.int32).repeat(sizes)
        positions = np.arange(len(segment_ids), dtype=np.int32)
        positions -= heads.astype(np.int32).repeat(sizes)
        is_padding = segment_ids == 0
        has_padding = bool(is_padding.any())
        if has_padding:
            positions[is_padding] = 0
        tokens = self._tokens(pieces, sizes, heads, is_padding if has_padding else None)
        batch = {"tokens": tokens, "segment_ids": segment_ids, "positions": positions}
        return {name: x.reshape(shape) for name, x in batch.items()}

    def _pieces(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """List the pieces of some packs, with one more at the end of each pack, which stands for its padding.

        Returns:
          (pieces, sizes, segments), int64 [pieces + n]: the number of the piece, or -1 for padding; its tokens in the batch; its
          number in the pack from 1, or 0 for padding.
        """
        starts = self.index.starts[indices].astype(np.int64)
        counts = self.index.starts[indices + 1].astype(np.int64) - starts
        per_pack = counts + 1
        last = np.cumsum(per_pack) - 1
        segments = np.arange(1, int(per_pack.sum()) + 1) - (last + 1 - per_pack).repeat(per_pack)
        pieces = starts.repeat(per_pack) + segments - 1
        pieces[last] = 0  # a piece that exists
        sizes = self.index.counts[pieces].astype(np.int64)
        if self._has_eos:
            sizes += self.index.ends[pieces]
        sizes[last] = 0
        filled = np.add.reduceat(sizes, last + 1 - per_pack) if len(last) else last
        sizes[last] = self.length - filled
        pieces[last], segments[last] = -1, 0
        return pieces, sizes, segments

    def _tokens(self, pieces: np.ndarray, sizes: np.ndarray, heads: np.ndarray, is_padding: np.ndarray | None) -> np.ndarray:
        """Gather the tokens of the pieces, one after the other."""
        index = self.index
        read = np.flatnonzero(pieces >= 0)
        read = read[index.counts[pieces[read]] > 0]  # leaves out an end of sequence that has a piece of its own
        chosen = pieces[read]
        if not len(chosen):
            tokens = np.full(int(sizes.sum()), self.values["padding"], self.dtype)
        else:
            documents, begins, counts = (x[chosen].astype(np.int64) for x in (index.documents, index.begins, index.counts))
            data, starts = self.documents.gather(documents, begins, counts)
            shifts = np.zeros(len(pieces), np.int64)
            shifts[read] = starts - heads[read]
            places = shifts.repeat(sizes)
            places += np.arange(len(places))
            if is_padding is not None:
                places[is_padding] = starts[0]  # any token: all places must exist
            if self._has_eos:
                places[self._eos_places(pieces, sizes, heads)] = starts[0]
            tokens = data.take(places).astype(self.dtype, copy=False)
            if is_padding is not None:
                tokens[is_padding] = self.values["padding"]
        if self._has_eos:
            tokens[self._eos_places(pieces, sizes, heads)] = self.values["eos"]
        return tokens

    def _eos_places(self, pieces: np.ndarray, sizes: np.ndarray, heads: np.ndarray) -> np.ndarray:
        ends = self.index.ends[pieces] & (pieces >= 0)
        return (heads + sizes)[ends] - 1
