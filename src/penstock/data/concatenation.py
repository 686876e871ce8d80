"""Read several sources as one: `concat`, and the sources of a mixture.

Sources whose records could not share a batch are refused, after a comparison of their first records.

`Gather` reads rows in memory without a call for each source: it finds the places of records, and then copies them. That takes
some microseconds more than to read a single array, which matters for small batches. So small arrays are copied into one, and
places are found for many batches at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from penstock.data.arrays import RowBlocks, is_array
from penstock.data.collate import pad_to
from penstock.data.source import Source, as_source, describe_source
from penstock.data.tree import Batch, Record, as_records, describe, describe_array, is_list_of_numbers, leaf_name, to_numpy


def concat(sources: Sequence[Any]) -> ConcatSource:
    """Put sources one after the other: the records of the first, then the records of the second, and so on.

    Args:
      sources: each of them is data for a `Loader`. Their records need the same structure, shapes and dtypes; the first record of
        each is read to compare them. Sources of single records (lists, datasets) may differ if a `ps.per_record` transform or
        a `collate` makes them alike. Arrays of less than 128 MiB in all are copied.

    Returns:
      A `Source`, for `ps.Loader`.

    Raises:
      TypeError: `sources` is not a list; a Loader cannot read one of them; one is a mixture.
      ValueError: there are no sources; one of them is empty; the first records of two sources differ in names, shapes or dtypes.

    Examples:
      >>> both = concat([{"x": np.array([1, 2])}, {"x": np.array([7, 8, 9])}])
      >>> len(both), both.read(np.array([4, 0]))["x"].tolist()
      (5, [9, 1])
    """
    return ConcatSource(as_sources(sources, "concat"))


def as_sources(sources: Any, function: str) -> list[Source]:
    """Make a source of each item of a list, and compare their records. `function` is the public one, for errors: see `concat`."""
    if not isinstance(sources, (list, tuple, Iterator, ValuesView)):
        what = f"one array, {describe_array(sources)}" if is_array(sources) else type(sources).__name__
        raise TypeError(f"{function} needs a list of sources, such as ps.{function}([a, b]); got {what}")
    made: list[Source] = []
    for number, each in enumerate(sources):
        try:
            made.append(as_source(each))
            records = len(made[-1])
        except (TypeError, ValueError) as error:
            error.add_note(f"penstock: source {number} of {function}")
            raise
        if records == 0:
            raise ValueError(f"source {number} of {function} has no records: leave it out")
        if has_weights(made[-1]):
            raise TypeError(
                f"source {number} of {function} is a mixture, whose weights would be lost: give its sources here"
                + (", with its weights times the weight it has here" if function == "mix" else ", or mix what is put together")
            )
    if not made:
        raise ValueError(f"{function} of no sources: give at least one")
    check_alike([spec for spec in record_specs(made) if not spec.is_record], f"ps.{function}")
    return made


def has_weights(source: Any) -> bool:
    """Tell whether a source is a `Mixture`, by whose weights only a `Loader` reads records."""
    return hasattr(source, "stages") and isinstance(getattr(source, "source", None), ConcatSource)


class ConcatSource:
    """A source with the records of several sources, one after the other.

    Args:
      copied: most bytes of arrays in memory that are copied into one.

    Attributes:
      starts: int64 [sources + 1], the index of the first record of each source, and the number of all records.
      is_gather: whether `read` only copies rows from memory or from memory-mapped files.
      gather: the reader of the records, if their places can be found before they are read; None if not.
    """

    def __init__(self, sources: Sequence[Source], copied: int = 128 << 20):
        self.sources = list(sources)
        self.starts = np.concatenate([[0], np.cumsum([len(source) for source in self.sources], dtype=np.int64)])
        self.is_gather = all(getattr(source, "is_gather", False) for source in self.sources)
        self.gather = gather_of(self.sources, copied)
        kind = type(self.sources[0])  # which may have a method to join its sources
        join = getattr(kind, "joined", None) if all(type(source) is kind for source in self.sources) else None
        self._joined: Source | None = None if join is None else join(self.sources)

    def __reduce__(self) -> Any:
        return ConcatSource, (self.sources, 0)  # worker processes share the memory of the sources

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, indices: np.ndarray) -> Batch | list[Record]:
        """Return the records at int64 [n]: a pytree of arrays [n, ...], or a list of n records if a source returns one."""
        if self.gather is not None:
            return self.gather.read(self.gather.places(indices))
        if self._joined is not None:
            return self._joined.read(indices)
        which = np.searchsorted(self.starts, indices, side="right") - 1
        parts: list[tuple[int, np.ndarray, Any]] = []  # number of a source, its rows of the batch, their records
        for number in np.flatnonzero(np.bincount(which, minlength=len(self.sources))).tolist():
            rows = np.flatnonzero(which == number)
            try:
                parts.append((number, rows, self.sources[number].read(indices[rows] - self.starts[number])))
            except Exception as error:
                error.add_note(f"penstock: source {number} of the {len(self.sources)} that are read as one")
                raise
        if len(parts) == 1:
            return parts[0][2]
        if any(isinstance(data, list) for _, _, data in parts):
            return _merged_records(parts, len(indices))
        return _merged_arrays(parts, len(indices))

    def __repr__(self) -> str:
        return f"concat({', '.join(f'{len(s):,} records of {type(s).__name__}' for s in self.sources)})"

    def describe(self) -> str:
        """Return the description of each source, with its number of records."""
        counts = np.diff(self.starts)
        return " + ".join(f"{count} × {describe_source(source)}" for count, source in zip(counts, self.sources, strict=True))


def _merged_records(parts: Sequence[tuple[int, np.ndarray, Any]], count: int) -> list[Record]:
    records: list[Record] = [None] * count
    for _, rows, data in parts:
        for row, record in zip(rows.tolist(), as_records(data, len(rows)), strict=True):
            records[row] = record
    return records


def _merged_arrays(parts: Sequence[tuple[int, np.ndarray, Any]], count: int) -> Batch:
    first, _, one = parts[0]
    leaves, structure = jax.tree_util.tree_flatten(one)
    out = [np.empty((count, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
    other: Any
    for number, rows, data in parts:
        others, other = jax.tree_util.tree_flatten(data)
        fits = other == structure and all(
            x.shape[1:] == y.shape[1:] and x.dtype == y.dtype for x, y in zip(others, leaves, strict=True)
        )
        if not fits:
            raise ValueError(
                f"the records of source {first} and source {number} differ, and cannot share a batch: {describe(one)} and "
                f"{describe(data)}, each with its rows. Give them the same names, shapes and dtypes where they are stored, or "
                "make them sources of records (lists of dicts), which transform=ps.per_record(fn) makes alike"
            )
        for whole, leaf in zip(out, others, strict=True):
            whole[rows] = leaf
    return jax.tree_util.tree_unflatten(structure, out)


@dataclass(frozen=True)
class RecordSpec:
    """The first record of a source, without its values."""

    source: str  # number and type, as "source 0 (ArraySource)"
    is_record: bool  # whether records are read one by one, so that a function may change them before they are stacked
    structure: Any
    leaves: dict[str, str]  # by name, as "uint8[28,28]", or the type; a length that is padded is left out, as in "int32[*]"


def record_specs(sources: Sequence[Source], pad: pad_to | None = None) -> list[RecordSpec]:
    """Read the first record of each source. `pad` pads records of different lengths; None if they are stacked."""
    return [_spec(number, source, pad) for number, source in enumerate(sources)]


def _spec(number: int, source: Source, pad: pad_to | None) -> RecordSpec:
    try:
        data = source.read(np.zeros(1, np.int64))
    except Exception as error:
        error.add_note(f"penstock: while reading the first record of source {number}")
        raise
    is_record = isinstance(data, list)
    paths, structure = jax.tree_util.tree_flatten_with_path(data[0] if is_record else data, is_list_of_numbers)
    leaves = {}
    for path, leaf in paths:
        name = leaf_name(path)
        is_padded = pad is not None and ("" in pad.lengths or name in pad.lengths)
        leaves[name] = _describe(leaf if is_record or not getattr(leaf, "shape", ()) else leaf[0], is_padded)
    return RecordSpec(f"source {number} ({type(source).__name__})", is_record, structure, leaves)


def _describe(leaf: Any, is_padded: bool) -> str:
    if isinstance(leaf, (str, bytes)):
        return type(leaf).__name__
    try:
        array = np.asarray(to_numpy(leaf))
    except (TypeError, ValueError):
        return type(leaf).__name__
    if array.dtype == object:
        return type(leaf).__name__
    if isinstance(leaf, list) and array.size == 0:
        return "list"  # no dtype is known
    what = describe_array(array)
    return what.replace(f"[{len(array)}", "[*", 1) if is_padded and array.ndim else what


def check_alike(specs: Sequence[RecordSpec], function: str) -> None:
    """Raise ValueError if two records differ in structure, dtype or shape. `function` reads the sources as one, for the error."""
    for other in specs[1:]:
        first = specs[0]
        leaves = {
            name: (first.leaves.get(name, "absent"), other.leaves.get(name, "absent"))
            for name in {**first.leaves, **other.leaves}
        }
        differing = {name: pair for name, pair in leaves.items() if pair[0] != pair[1] and "list" not in pair}
        if not differing and other.structure == first.structure:
            continue
        listed = ", ".join(f"leaf {name!r} of a record is {a} and {b}" for name, (a, b) in [*differing.items()][:4])
        raise ValueError(
            f"{function}: {first.source} and {other.source} have records that differ, so batches would change with the source: "
            f"{listed or f'the structure is {first.structure} and {other.structure}'}. Make them alike where they are stored, "
            "for example by array.astype(dtype); or give sources of records (lists of dicts, datasets), which "
            "transform=ps.per_record(fn) makes alike"
        )


def gather_of(sources: Sequence[Source], copied: int) -> Gather | None:
    """Return a reader of several sources, whose record indices count through all of them.

    Args:
      sources: can be gathered from if they have a method `row_blocks`, which returns a pytree of `RowBlocks`.
      copied: most bytes of arrays that are copied into one.

    Returns:
      None if the sources cannot be gathered from, or have different leaves.
    """
    trees = [blocks() for source in sources if (blocks := getattr(source, "row_blocks", None)) is not None]
    if len(trees) < len(sources) or any(tree is None for tree in trees):
        return None
    structures: list[Any] = [jax.tree_util.tree_structure(tree) for tree in trees]
    leaves = [[x.blocks for x in column] for column in zip(*map(jax.tree_util.tree_leaves, trees), strict=False)]
    columns = [[block for blocks in column for block in blocks] for column in leaves]
    alike = all(len({(block.dtype, block.shape[1:]) for block in blocks}) == 1 for blocks in columns)
    if any(structure != structures[0] for structure in structures) or not alike:
        return None
    return Gather([RowBlocks(blocks) for blocks in _copy_smallest(columns, copied)], structures[0])


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
    """A reader of batches: the rows of each leaf in memory, and the structure of a batch."""

    def __init__(self, columns: Sequence[RowBlocks], structure: Any):
        self._columns, self._structure = columns, structure

    def places(self, indices: np.ndarray) -> list[np.ndarray]:
        """Return where the records at int64 [...] lie: for each leaf, an array of the same shape."""
        return [column.places(indices) for column in self._columns]

    def read(self, places: Sequence[np.ndarray]) -> Batch:
        """Return the batch of the records at these places, int64 [n] for each leaf."""
        leaves = [column.read(x) for column, x in zip(self._columns, places, strict=True)]
        return jax.tree_util.tree_unflatten(self._structure, leaves)
