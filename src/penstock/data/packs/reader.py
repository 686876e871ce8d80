"""Read packs by their index: tokens, segment ids and positions.

A batch is one gather of tokens, and no Python code runs for each token or piece. `join` makes one reader of the packs of several
sources, so a batch of a mixture takes as long as one of a single source.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from penstock.data.arrays import span
from penstock.data.packs.documents import Documents, PieceReader
from penstock.data.packs.index import PackIndex, smallest
from penstock.data.tree import Batch


class PackReader:
    """A reader of packs.

    Attributes:
      length: tokens in a pack.
      dtype: of the tokens.
      values: the token that fills a pack up, "padding", and the one that ends a document, "eos", if there is one.
    """

    def __init__(self, documents: PieceReader, index: PackIndex, length: int, dtype: np.dtype, values: dict[str, int]):
        self.documents, self.index, self.length, self.dtype, self.values = documents, index, length, dtype, values
        self._has_eos = "eos" in values

    def __len__(self) -> int:
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


_COPIED = 128 << 20  # bytes of all indices, at most


def join(readers: Sequence[PackReader]) -> PackReader | None:
    """Return a reader of the packs of all readers, one after the other, with a copy of their indices.

    Returns:
      None if packs differ in length, dtype or values, or if the indices are large.
    """
    first = readers[0]
    alike = all((x.length, x.dtype, x.values) == (first.length, first.dtype, first.values) for x in readers)
    size = sum(x.nbytes for reader in readers for x in vars(reader.index).values())
    if not alike or size > _COPIED:
        return None
    indices = [reader.index for reader in readers]
    documents = JoinedDocuments([reader.documents for reader in readers])
    pieces = np.cumsum([0, *(len(index.counts) for index in indices)]).tolist()
    starts = [_shifted(index.starts[:-1], by, pieces[-1]) for index, by in zip(indices, pieces, strict=False)]
    numbers = [_shifted(index.documents, by, len(documents)) for index, by in zip(indices, documents.starts, strict=False)]
    joined = PackIndex(
        starts=np.concatenate([*starts, np.array(pieces[-1:], starts[0].dtype)]),
        documents=np.concatenate(numbers),
        begins=_concatenated([index.begins for index in indices]),
        counts=_concatenated([index.counts for index in indices]),
        ends=np.concatenate([index.ends for index in indices]),
    )
    return PackReader(documents, joined, first.length, first.dtype, first.values)


def _shifted(numbers: np.ndarray, by: int, most: int) -> np.ndarray:
    return (numbers.astype(np.int64) + by).astype(smallest(most))


def _concatenated(numbers: Sequence[np.ndarray]) -> np.ndarray:
    largest = max(numbers, key=lambda x: x.itemsize).dtype
    return np.concatenate([x.astype(largest) for x in numbers])


class JoinedDocuments:
    """Documents of several readers, one after the other."""

    def __init__(self, readers: Sequence[PieceReader]):
        self._readers = list(readers)
        self.starts = np.cumsum([0, *map(len, readers)]).tolist()  # the first document of each reader, and the number of all
        self._memory = _in_memory(readers)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def gather(self, documents: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self._memory is not None:
            tokens, firsts = self._memory
            return tokens, firsts[documents] + begins
        places = np.empty(len(documents), np.int64)
        found: list[tuple[np.ndarray, np.ndarray]] = []  # pieces, and the array with their tokens
        for number, (start, stop) in enumerate(pairwise(self.starts)):
            here = np.flatnonzero((documents >= start) & (documents < stop))
            if not len(here):
                continue
            try:
                tokens, places[here] = self._readers[number].gather(documents[here] - start, begins[here], counts[here])
            except Exception as error:
                error.add_note(f"penstock: source {number} of the {len(self._readers)} that are read as one")
                raise
            found.append((here, tokens))
        if len(found) == 1:
            return found[0][1], places
        spanned = span([tokens for _, tokens in found])
        if spanned is None:
            return _copied(found, places, counts)
        for (here, _), distance in zip(found, spanned[1].tolist(), strict=True):
            places[here] += distance
        return spanned[0], places


def _in_memory(readers: Sequence[PieceReader]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return one array with the tokens of all readers, and the place of the first token of each document in it, int64 [N].

    None if a reader does not have its tokens in memory, or their arrays are not alike.
    """
    parts = [reader.in_memory() if isinstance(reader, Documents) else None for reader in readers]
    known = [part for part in parts if part is not None]
    spanned = span([tokens for tokens, _ in known]) if len(known) == len(parts) else None
    if spanned is None:
        return None
    return spanned[0], np.concatenate([firsts + by for (_, firsts), by in zip(known, spanned[1].tolist(), strict=True)])


def _copied(found: list[tuple[np.ndarray, np.ndarray]], places: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Copy pieces into one array."""
    starts = np.cumsum(counts) - counts
    out = np.empty(int(counts.sum()), np.result_type(*(tokens.dtype for _, tokens in found)))
    for here, tokens in found:
        for place, start, count in zip(places[here].tolist(), starts[here].tolist(), counts[here].tolist(), strict=True):
            out[start : start + count] = tokens[place : place + count]
    return out, starts
