"""Pack documents of different lengths into records of one length, {tokens, segment_ids, positions}: `pack`.

`index` computes once which pieces of which documents each pack holds, so a pack is a function of its number. `reader` reads packs
by this index.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from penstock._arguments import at_least
from penstock.data.packs.documents import DocumentReader, as_documents
from penstock.data.packs.index import Long, Method, PackIndex, PackSettings, hash_lengths, make_index, open_index, save_index
from penstock.data.packs.reader import PackReader, join
from penstock.data.tree import Batch

_SAMPLE, _SAMPLE_TOKENS = 64, 1024  # documents whose first tokens are part of the fingerprint


def pack(
    source: Any,
    length: int,
    *,
    leaf: str | None = None,
    method: Method = "best_fit",
    window: int = 16_384,
    long: Long = "split",
    seed: int | None = None,
    eos: int | None = None,
    padding: int = 0,
    index: str | os.PathLike[str] | None = None,
) -> PackSource:
    """Pack documents of different lengths into records of one length.

    A record is a dict of three arrays [length]. `tokens` has the dtype of the documents, and `padding` at the end. `segment_ids`,
    int32, numbers the documents in the pack from 1, and is 0 for padding. `positions`, int32, counts the tokens of each segment
    from 0. Every token of every document is in exactly one pack. A pack never depends on workers, processes or epochs;
    `ps.Loader(..., shuffle=True)` shuffles the packs.

    Args:
      source: documents: a list of arrays or lists of numbers, an Arrow or Hugging Face column of lists, a torch `Dataset`, or
        anything else that `ps.Loader` reads whose records have a 1-D array of numbers. `penstock.data.Documents(tokens, offsets)`
        for documents that lie in one array.
      length: tokens in a pack.
      leaf: name of the leaf with the tokens, such as "input_ids"; None for the only leaf that can be one.
      method: "best_fit" cuts documents only if they are longer than a pack, and leaves a few tokens of padding (best-fit
        decreasing in windows of consecutive documents). "concat" puts all documents one after the other and cuts every `length`
        tokens, so only the last pack has padding.
      window: documents that "best_fit" packs together. More fill the packs better; fewer keep closer to the order of storage.
      long: "split" cuts a document that is longer than a pack; "error" refuses it.
      seed: None takes the documents in the order of storage. A number takes them in a random order, so that the documents of a
        pack are unrelated.
      eos: a token to put after each document; None for none.
      padding: the value of tokens that belong to no document.
      index: path of a file that keeps the index. It is made in the first run and mapped into memory in later ones, after a check
        that the documents are still the same. None computes it in each run.

    Returns:
      A `Source` of packs. Its attribute `fullness` is the part of all tokens that is not padding.

    Raises:
      ValueError: there are no tokens; a document is too long and `long="error"`; a leaf has no 1-D array of numbers; no one dtype
        holds the tokens of all documents; the file of the index is damaged, or was made with other settings or documents.
      OSError: the index cannot be written.

    Examples:
      >>> packed = ps.pack([[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]], length=8)
      >>> batch = ps.Loader(packed, batch_size=2)[0]
      >>> batch["tokens"]
      array([[ 1,  2,  3,  4,  5,  8,  9, 10],
             [ 6,  7,  0,  0,  0,  0,  0,  0]])
      >>> batch["segment_ids"].tolist()[0], batch["positions"].tolist()[0]
      ([1, 1, 1, 1, 1, 2, 2, 2], [0, 1, 2, 3, 4, 0, 1, 2])
    """
    for name, given, choices in (("method", method, get_args(Method)), ("long", long, get_args(Long))):
        if given not in choices:
            raise ValueError(f"ps.pack: {name}={given!r}: choose from {', '.join(choices)}")
    settings = PackSettings(
        length=at_least(1, "ps.pack: length", length),
        method=method,
        window=at_least(1, "ps.pack: window", window),
        long=long,
        seed=None if seed is None else at_least(0, "ps.pack: seed", seed),
        has_eos=eos is not None,
    )
    if index is not None and not os.fspath(index):
        raise ValueError("ps.pack: index='' is not a path: give the path of a file, or None to keep the index in memory")
    documents = as_documents(source, leaf)
    path = None if index is None else os.path.abspath(os.path.expanduser(os.fsdecode(index)))
    pieces, made_of = _index(documents, settings, path)
    values = {"padding": padding} if eos is None else {"padding": padding, "eos": eos}
    for name, value in values.items():
        _check_value(name, value, np.dtype(made_of["dtype"]))
    return PackSource(documents, pieces, settings, made_of, values, path)


class PackSource:
    """A source of packed documents; see `pack`.

    Attributes:
      length: tokens in a pack.
      tokens: tokens of all documents, with the tokens that end documents.
      fullness: the part of all tokens that is not padding.
      fingerprint: a hash of the settings, of the lengths of all documents, and of the first tokens of some.
    """

    def __init__(
        self,
        documents: DocumentReader,
        index: PackIndex,
        settings: PackSettings,
        made_of: dict[str, Any],
        values: dict[str, int],
        path: str | None,
    ):
        self._documents, self._settings, self._values, self._path = documents, settings, values, path
        self._reader = self._made_reader(index, made_of)
        self.length = settings.length
        self.fingerprint = _fingerprint(made_of)
        self.tokens = int(made_of["tokens"])
        self.fullness = self.tokens / (len(self) * self.length)

    def __len__(self) -> int:
        return len(self._reader)

    def read(self, indices: np.ndarray) -> Batch:
        """Return tokens, segment ids and positions, each [n, length], of the packs at int64 [n]."""
        return self._reader.read(indices)

    @staticmethod
    def joined(sources: Sequence[PackSource]) -> PackReader | None:
        """Return a reader of the packs of several sources, one after the other; None if it cannot read them as one."""
        return join([source._reader for source in sources])

    def describe(self) -> str:
        """Return the settings, the documents, and a hash of the settings and the lengths of all documents."""
        settings = ", ".join(f"{name}={value!r}" for name, value in (self._settings.as_dict() | self._values).items())
        return f"pack({settings}) of {len(self._documents):,} documents ({self._documents.describe()}), {self.fingerprint}"

    def __repr__(self) -> str:
        return f"<{len(self):,} packs of {self.length} tokens, {self.fullness:.2%} full: {self.describe()}>"

    def _made_reader(self, index: PackIndex, made_of: dict[str, Any]) -> PackReader:
        return PackReader(self._documents, index, self._settings.length, np.dtype(made_of["dtype"]), self._values)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ if self._path is None else self.__dict__ | {"_reader": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        if self._path is None:
            return
        # Another process may have made the file at the same time. Then it is another file with the same index.
        index, made_of = open_index(self._path)
        self._reader = self._made_reader(index, made_of)
        if _fingerprint(made_of) != self.fingerprint:
            raise ValueError(f"{self._path!r} was replaced by an index of other documents or settings while this run uses it")


def _index(documents: DocumentReader, settings: PackSettings, path: str | None) -> tuple[PackIndex, dict[str, Any]]:
    """Open the index at a path, or make it. Return it with the description of its data and settings."""
    if path is not None and os.path.isdir(path):
        example = os.path.join(path, "pack.index")
        raise IsADirectoryError(f"index={path!r} is a folder: give the path of a file, such as {example!r}")
    if path is None or not os.path.exists(path):
        lengths, dtype = documents.scan()
        index = make_index(lengths, settings)
        made_of = _made_of(documents, settings, lengths, dtype)
        if path is None:
            return index, made_of
        save_index(path, index, made_of)
        # Another process may have replaced the file since. So it is opened and checked like any other.
    index, made_of = open_index(path)
    _check_made_of(path, made_of, documents, settings)
    return index, made_of


def _made_of(documents: DocumentReader, settings: PackSettings, lengths: np.ndarray, dtype: np.dtype) -> dict[str, Any]:
    """Return all that an index depends on, for JSON."""
    return {
        "settings": settings.as_dict(),
        "source": documents.describe(),
        "documents": len(lengths),
        "tokens": int(lengths.sum()) + settings.has_eos * int(np.count_nonzero(lengths)),
        "lengths": hash_lengths(lengths),
        "dtype": dtype.name,
        "sample": _sample(documents),
    }


def _sample(documents: DocumentReader) -> list[list[int]]:
    """Return the numbers, the lengths and the CRC-32 of the first tokens of documents that are evenly spaced."""
    numbers = np.unique(np.linspace(0, len(documents) - 1, _SAMPLE).astype(np.int64))
    lengths = documents.lengths_of(numbers)
    counts = np.minimum(lengths, _SAMPLE_TOKENS)
    filled = np.flatnonzero(counts)
    checksums = np.zeros(len(numbers), np.int64)
    if len(filled):
        data, starts = documents.gather(numbers[filled], np.zeros(len(filled), np.int64), counts[filled])
        for i, start in zip(filled.tolist(), starts.tolist(), strict=True):
            checksums[i] = zlib.crc32(np.ascontiguousarray(data[start : start + counts[i]]).view(np.uint8))
    return [[int(x) for x in row] for row in zip(numbers, lengths, checksums, strict=True)]


def _fingerprint(made_of: dict[str, Any]) -> str:
    decisive = {name: value for name, value in made_of.items() if name != "source"}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def _check_made_of(path: str, made_of: dict[str, Any], documents: DocumentReader, settings: PackSettings) -> None:
    """Raise ValueError if an index on disk was made with other settings, or of other documents."""
    before, now = made_of["settings"], settings.as_dict()
    if different := [name for name in {**now, **before} if before.get(name) != now.get(name)]:
        listed = ", ".join(f"{name}={before.get(name)!r} (now {now.get(name)!r})" for name in different)
        raise ValueError(f"the index {path!r} was made with {listed}: give index= another path, or delete it")
    changed = f"the documents have changed since the index {path!r} was made: "
    remedy = ". Delete it to pack them again, from step 0; to continue a run, give it the documents that it began with"
    if made_of["documents"] != len(documents):
        raise ValueError(f"{changed}there were {made_of['documents']:,}, and are {len(documents):,}{remedy}")
    if documents.knows_lengths:
        lengths, dtype = documents.scan()
        if made_of["lengths"] != hash_lengths(lengths):
            raise ValueError(f"{changed}their lengths differ{remedy}")
        if made_of["dtype"] != dtype.name:
            raise ValueError(f"{changed}their tokens were {made_of['dtype']}, and are {dtype.name}{remedy}")
    for old, new in zip(made_of["sample"], _sample(documents), strict=True):
        if old != new:
            what = f"had {old[1]:,} tokens, and has {new[1]:,}" if old[1] != new[1] else "holds other tokens"
            raise ValueError(f"{changed}document {old[0]} {what}{remedy}")


def _check_value(name: str, value: Any, dtype: np.dtype) -> None:
    """Raise ValueError if the dtype of the tokens cannot represent a value."""
    try:
        same = bool(np.array(value).astype(dtype) == value)
    except (TypeError, ValueError, OverflowError):
        same = False
    if not same:
        raise ValueError(f"ps.pack: the tokens are {dtype}, which cannot hold {name}={value!r}: give another value")
