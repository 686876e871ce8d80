"""Read documents, which are 1-D arrays of tokens of different lengths, from any data: `as_documents`.

A reader returns the length of each document, and gathers pieces of documents. `Documents` has one array of tokens, and needs no
Python call for each document. Neither does `ArrowDocuments`, for a list column of an Arrow table: in memory, in files or in a
Hugging Face dataset. It views the chunks as one array of tokens, without a copy. `RecordDocuments` reads any source record by
record. The leaf with the tokens is found by name, or because it is the only 1-D array of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol, cast

import jax
import numpy as np

from penstock.data.array_pickling import from_picklable, to_picklable
from penstock.data.arrays import ArraySource, RowBlocks, is_stored, read_ranges, span
from penstock.data.concatenation import has_weights
from penstock.data.source import Source, as_source, describe_source
from penstock.data.tree import (
    Record,
    as_records,
    describe_array,
    is_list_of_numbers,
    is_numeric,
    leaf_name,
    leaves_with_names,
    to_numpy,
)

if TYPE_CHECKING:
    from penstock.data.arrow import ArrowSource

_BLOCK = 4096  # documents that are read at a time when all of them are read


class PieceReader(Protocol):
    """Documents, of which pieces are read."""

    def __len__(self) -> int:
        """Return the number of documents."""

    def gather(self, documents: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find pieces of documents.

        Args:
          documents: int64 [n], the document of each piece.
          begins: int64 [n], the first token of each piece in its document.
          counts: int64 [n], the tokens of each piece, >= 1.

        Returns:
          (tokens, starts): an array [m], and the place of the first token of each piece in it, int64 [n].
        """


class DocumentReader(PieceReader, Protocol):
    """The documents of a data set."""

    knows_lengths: bool  # whether `scan` reads no tokens

    def scan(self) -> tuple[np.ndarray, np.dtype]:
        """Return the number of tokens of each document, int64 [N], and a dtype that holds all tokens."""

    def lengths_of(self, documents: np.ndarray) -> np.ndarray:
        """Return the number of tokens of some documents, int64 [n]."""

    def describe(self) -> str:
        """Return a description of the documents for the state of a feed."""


def as_documents(data: Any, leaf: str | None) -> DocumentReader:
    """Make a reader of documents of any data that `as_source` takes, or of `Documents`.

    The leaf with the tokens has the name `leaf`, such as "input_ids", or is the only one that can be. A list of records in memory
    is copied once into one array of tokens, unless it holds memmaps.
    """
    if isinstance(data, Documents):
        return data
    package = type(data).__module__.partition(".")[0]
    if leaf is not None and package == "datasets" and leaf in getattr(data, "column_names", ()):
        data = data.select_columns([leaf])
    elif leaf is not None and package == "pyarrow" and leaf in getattr(data, "column_names", ()):
        data = data.select([leaf])
    source = as_source(data)
    if has_weights(source):
        raise TypeError("ps.pack of a mixture would lose its weights: pack each source, and mix the packs")
    if isinstance(data, list) and not any(isinstance(record, np.memmap) for record in data):
        return _flatten(data, leaf)
    if isinstance(source, ArraySource):
        return _rows_of_arrays(source, leaf)
    if hasattr(source, "ragged_columns") and (found := arrow_documents(cast("ArrowSource", source), leaf)):
        return found
    return RecordDocuments(source, leaf)


def _flatten(records: Sequence[Record], leaf: str | None) -> Documents:
    """Copy the tokens of a list of records into one array."""
    path, name = find_leaf(records[0], leaf)
    lengths, parts, dtypes = np.empty(len(records), np.int64), [], dict[np.dtype, int]()
    for start in range(0, len(records), _BLOCK):
        block = [get_tokens(record, path, name, i) for i, record in enumerate(records[start : start + _BLOCK], start)]
        lengths[start : start + len(block)] = [len(tokens) for tokens in block]
        for i, tokens in enumerate(block, start):
            if len(tokens):  # an empty list has no known dtype
                dtypes.setdefault(tokens.dtype, i)
        common_dtype(dtypes)
        parts += [np.concatenate(filled)] if (filled := [tokens for tokens in block if len(tokens)]) else []
    if not parts:
        raise ValueError(f"no tokens: all {len(records):,} documents are empty")
    return Documents(np.concatenate(parts), np.concatenate([[0], np.cumsum(lengths)]))


def _rows_of_arrays(source: ArraySource, leaf: str | None) -> DocumentReader:
    """Read the rows of an array [N, L] as N documents of L tokens."""
    named = dict(leaves_with_names(source.arrays))
    if leaf is not None and leaf not in named:
        raise ValueError(no_leaf(leaf, list(named)))
    chosen = {leaf: named[leaf]} if leaf is not None else {n: x for n, x in named.items() if len(x.shape) == 2} or named
    name, array = only(chosen)
    if len(array.shape) == 1:
        raise ValueError(
            f"ps.pack: each record of {name!r}, {describe_array(array)}, is one number, and not a document: give "
            "penstock.data.Documents(tokens, offsets) for documents that lie in one array, or use ps.windows"
        )
    if len(array.shape) != 2 or not is_numeric(array.dtype):
        raise ValueError(f"ps.pack needs 1-D documents of numbers, and {name!r} is {describe_array(array)}")
    if is_stored(array):
        return RecordDocuments(source, name)
    return Documents(array.reshape(-1), np.arange(len(array) + 1) * array.shape[1])


class Documents:
    """A source of documents that lie one after the other in one array of tokens.

    Each record is one document, an array of its tokens. `ps.pack` reads it without a Python call for each document.

    Args:
      tokens: an array or memmap [T] of NumPy, h5py, zarr, torch or JAX.
      offsets: integers [N + 1]. Document i is `tokens[offsets[i]:offsets[i + 1]]`.

    Raises:
      ValueError: an array is not 1-D; the offsets decrease, or lie outside of the tokens; there are no documents.
      TypeError: the tokens are not numbers, or the offsets not integers.

    Examples:
      >>> from penstock.data import Documents
      >>> documents = Documents(np.array([5, 6, 7, 8, 9]), offsets=[0, 3, 5])
      >>> documents.read(np.array([1, 0]))
      [array([8, 9]), array([5, 6, 7])]
    """

    knows_lengths = True

    def __init__(self, tokens: Any, offsets: Any):
        tokens = ArraySource(tokens).arrays
        if not hasattr(tokens, "shape") or len(tokens.shape) != 1:
            what = describe_array(tokens) if hasattr(tokens, "shape") else type(tokens).__name__
            raise ValueError(f"the tokens of Documents are {what}: give one array [T]")
        if not is_numeric(tokens.dtype):
            raise TypeError(f"the tokens of Documents have dtype {tokens.dtype}: give numbers")
        offsets = np.asarray(to_numpy(offsets))
        if offsets.ndim != 1 or len(offsets) < 2 or offsets.dtype.kind not in "iu":
            raise ValueError(
                f"the offsets of Documents are {describe_array(offsets)}: give integers [N + 1] for N >= 1 documents, where "
                "document i is tokens[offsets[i]:offsets[i + 1]]"
            )
        offsets = offsets.astype(np.int64, copy=False)
        _check_offsets(offsets, tokens.shape[0])
        self._offsets = offsets
        # `take` would copy another array as a whole for each batch.
        self._tokens = tokens if is_stored(tokens) else np.ascontiguousarray(tokens)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._offsets) - 1

    def read(self, indices: np.ndarray) -> list[np.ndarray]:
        """Return the documents at int64 [n], one new array each."""
        begins, ends = self._offsets[indices], self._offsets[indices + 1]
        return [np.array(self._tokens[b:e]) for b, e in zip(begins.tolist(), ends.tolist(), strict=True)]

    def scan(self) -> tuple[np.ndarray, np.dtype]:
        return np.diff(self._offsets), self._tokens.dtype

    def lengths_of(self, documents: np.ndarray) -> np.ndarray:
        return self._offsets[documents + 1] - self._offsets[documents]

    def gather(self, documents: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        starts = self._offsets[documents] + begins
        return read_ranges(self._tokens, starts, counts) if is_stored(self._tokens) else (self._tokens, starts)

    def in_memory(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the tokens, and the place of the first token of each document, int64 [N]; None if a file has to be read."""
        return None if is_stored(self._tokens) else (self._tokens, self._offsets[:-1])

    def describe(self) -> str:
        return f"documents: {self._tokens.dtype}[T]"

    def __getstate__(self) -> dict[str, Any]:
        return {"arrays": to_picklable((self._tokens, self._offsets))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._tokens, self._offsets = from_picklable(state["arrays"])


def _check_offsets(offsets: np.ndarray, tokens: int) -> None:
    steps = np.diff(offsets)
    if (steps < 0).any():
        i = int(np.argmax(steps < 0))
        raise ValueError(
            f"offsets[{i + 1}] = {offsets[i + 1]:,} is less than offsets[{i}] = {offsets[i]:,}: offsets of documents must not "
            "decrease (offsets follow from lengths by np.concatenate([[0], np.cumsum(lengths)]))"
        )
    if offsets[0] < 0 or offsets[-1] > tokens:
        raise ValueError(f"the offsets reach from {offsets[0]:,} to {offsets[-1]:,}, and there are {tokens:,} tokens")


def arrow_documents(source: ArrowSource, leaf: str | None) -> ArrowDocuments | None:
    """Return a reader of the lists of numbers in a column, or in the only list column.

    Returns:
      None if the column is not a list of numbers, or has nulls in rows that are not used.
    """
    lists = source.ragged_columns()
    if leaf is None and len(lists) > 1:
        several = f"the table has several columns of lists, {list(lists)}"
        raise ValueError(f"ps.pack: {several}: say which holds the tokens, leaf='name'")
    name = next(iter(lists), None) if leaf is None else leaf
    return None if name not in lists else ArrowDocuments(source.select(name), name)


class ArrowDocuments:
    """Documents in the only column of an `ArrowSource`."""

    knows_lengths = True

    def __init__(self, source: ArrowSource, name: str):
        self._source, self._name = source, name
        blocks = source.ragged_columns()[name]
        offsets = [block[0] for block in blocks]
        self._begins = RowBlocks([at[:-1] for at in offsets])
        self._ends = RowBlocks([at[1:] for at in offsets])
        filled = [len(values) > 0 for _, values in blocks]
        tokens = [values for _, values in blocks if len(values)] or [blocks[0][1]]
        self._tokens, starts = span(tokens) or (np.concatenate(tokens), np.cumsum([0, *map(len, tokens[:-1])]))
        self._chunk_starts = np.zeros(len(blocks), np.int64)  # of the chunks in `_tokens`
        self._chunk_starts[filled] = starts[: sum(filled)]

    def __len__(self) -> int:
        return len(self._source)

    def scan(self) -> tuple[np.ndarray, np.dtype]:
        return self.lengths_of(np.arange(len(self))), self._tokens.dtype

    def lengths_of(self, documents: np.ndarray) -> np.ndarray:
        rows = self._source.table_rows(documents)
        return self._ends.take(rows).astype(np.int64) - self._begins.take(rows)

    def gather(self, documents: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = self._source.table_rows(documents)
        return self._tokens, self._chunk_starts[self._begins.block_of(rows)] + self._begins.take(rows) + begins

    def describe(self) -> str:
        return self._source.describe()

    def __reduce__(self) -> Any:
        return ArrowDocuments, (self._source, self._name)


class RecordDocuments:
    """Documents of any source, read record by record."""

    knows_lengths = False

    def __init__(self, source: Source, leaf: str | None):
        self._source = source
        self._path, self._name = find_leaf(as_records(source.read(np.arange(1)), 1)[0], leaf)

    def __len__(self) -> int:
        return len(self._source)

    def scan(self) -> tuple[np.ndarray, np.dtype]:
        """Read all documents. See `DocumentReader`."""
        lengths, dtypes = np.empty(len(self), np.int64), dict[np.dtype, int]()
        for start in range(0, len(self), _BLOCK):
            block = np.arange(start, min(start + _BLOCK, len(self)))
            for i, tokens in zip(block.tolist(), self._tokens(block), strict=True):
                lengths[i] = len(tokens)
                if len(tokens):  # an empty list has no known dtype
                    dtypes.setdefault(tokens.dtype, i)
        return lengths, common_dtype(dtypes)

    def lengths_of(self, documents: np.ndarray) -> np.ndarray:
        return np.array([len(tokens) for tokens in self._tokens(documents)], np.int64)

    def gather(self, documents: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read pieces of documents. Raise ValueError if a document has become shorter."""
        distinct, which = np.unique(documents, return_inverse=True)
        records = list(self._tokens(distinct))
        pieces = []
        for i, begin, count in zip(which.tolist(), begins.tolist(), counts.tolist(), strict=True):
            piece = records[i][begin : begin + count]
            if len(piece) < count:
                raise ValueError(
                    f"document {distinct[i]} has {len(records[i]):,} tokens, and had at least {begin + count:,} when it was "
                    "packed: a source must return the same records each time. Pack it again"
                )
            pieces.append(piece)
        return np.concatenate(pieces), np.cumsum(counts) - counts

    def describe(self) -> str:
        return f"{describe_source(self._source)}: {self._name}"

    def _tokens(self, documents: np.ndarray) -> Iterator[np.ndarray]:
        for i, record in zip(documents.tolist(), as_records(self._source.read(documents), len(documents)), strict=True):
            yield get_tokens(record, self._path, self._name, i)


# The leaf of a record that holds its tokens.


def find_leaf(record: Record, leaf: str | None) -> tuple[Sequence[Any], str]:
    """Return the path and the name of a leaf; without a name, of the only leaf that is a 1-D array (or list) of numbers."""
    paths, _ = jax.tree_util.tree_flatten_with_path(record, is_list_of_numbers)
    named = {leaf_name(path): (path, value) for path, value in paths}
    if leaf is None:
        found = {name: each for name, each in named.items() if _may_be_tokens(each[1])} or named
        name, (path, _) = only(found)
        return path, name
    if leaf not in named:
        raise ValueError(no_leaf(leaf, list(named)))
    return named[leaf][0], leaf


def only(leaves: dict[str, Any]) -> tuple[str, Any]:
    """Return the name and the value of the only leaf. Raise ValueError if there are others."""
    if len(leaves) != 1:
        names = ", ".join(map(repr, leaves)) or "none"
        raise ValueError(f"ps.pack: the records have several leaves ({names}): say which one holds the tokens, leaf='name'")
    return next(iter(leaves.items()))


def no_leaf(leaf: str, names: list[str]) -> str:
    """Say that there is no leaf of this name, and which there are."""
    has = "are arrays without names: leave `leaf` out" if names == ["batch"] else f"have {names}"
    return f"ps.pack: the records have no leaf {leaf!r}; they {has}"


def _may_be_tokens(value: Any) -> bool:
    if isinstance(value, (str, bytes)):
        return False
    try:
        array = np.asarray(to_numpy(value))
    except (TypeError, ValueError):
        return False
    return array.ndim == 1 and is_numeric(array.dtype)


_GETTERS: dict[type, Callable[[Any, Any], Any]] = {
    jax.tree_util.DictKey: lambda node, key: node[key.key],
    jax.tree_util.SequenceKey: lambda node, key: node[key.idx],
    jax.tree_util.GetAttrKey: lambda node, key: getattr(node, key.name),
}


def get_tokens(record: Record, path: Sequence[Any], name: str, number: int) -> np.ndarray:
    """Return the leaf of a record at a path of JAX keys as an array of tokens [T]. The map of a memmap is not read."""
    try:
        value = reduce(lambda node, key: _GETTERS[type(key)](node, key), path, record)
    except (KeyError, IndexError, AttributeError, TypeError):
        raise ValueError(f"ps.pack: record {number} has no leaf {name!r}; the first record has it") from None
    if type(value) is np.ndarray and value.ndim == 1 and value.dtype.kind in "iuf":
        return value
    if isinstance(value, (str, bytes)):
        raise ValueError(
            f"ps.pack: leaf {name!r} of record {number} is {type(value).__name__}, and not an array of tokens: tokenize it before"
        )
    try:
        tokens = np.asarray(to_numpy(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"ps.pack: leaf {name!r} of record {number} makes no array: {error}") from error
    if tokens.ndim != 1 or not is_numeric(tokens.dtype):
        what = f"leaf {name!r} of record {number} is {describe_array(tokens)}"
        raise ValueError(f"ps.pack: {what}; it needs one array [T] of numbers")
    return tokens


def common_dtype(dtypes: dict[np.dtype, int]) -> np.dtype:
    """Return the dtype that holds the tokens of all documents. `dtypes` gives the first document of each dtype.

    Raises:
      ValueError: there is none, or integers would become floats, which do not hold all of them.
    """
    (first, number), *others = dtypes.items() or [(np.dtype(np.int64), 0)]
    common = first
    for dtype, other in others:
        try:
            wider = np.result_type(common, dtype)
        except TypeError:  # NumPy has no dtype for both
            wider = np.dtype(object)
        if wider.kind == "O" or len({each.kind in "iub" for each in (common, dtype, wider)}) > 1:
            raise ValueError(
                f"ps.pack: document {number} has tokens of {first}, and document {other} of {dtype}, which no one dtype holds "
                "without loss: give all documents the same one, for example np.asarray(tokens, np.int32)"
            )
        common = wider
    return common
