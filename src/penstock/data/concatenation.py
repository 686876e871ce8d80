"""Several sources as one: `concat`.

Sources go in; one source with the records of the first, then those of the second, and so on, comes out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, ValuesView
from typing import Any

import jax
import numpy as np

from penstock.data.arrays import is_array
from penstock.data.gather import gather_of
from penstock.data.record_spec import check_alike, record_specs
from penstock.data.source import Source, as_source, describe_source
from penstock.data.tree import Batch, Record, describe, describe_array, unstack


def concat(sources: Sequence[Any]) -> ConcatSource:
    """Put sources one after the other: the records of the first, then those of the second, and so on.

    Args:
      sources: whatever a `Loader` takes, each. Their records need the same structure, shapes and dtypes; the first record of
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
    """Make a source of each item of a list, and compare their records.

    Args:
      function: name of the public function, for errors.

    Raises:
      TypeError, ValueError: see `concat`. A note names the source.
    """
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
    """Tell whether a source is a `Mixture`, whose records a `Loader` alone reads by its weights."""
    return hasattr(source, "stages") and isinstance(getattr(source, "source", None), ConcatSource)


class ConcatSource:
    """A source with the records of several sources, one after the other.

    Args:
      sources: the sources.
      copied: most bytes of arrays in memory that are copied into one.

    Attributes:
      sources: the sources.
      starts: int64 [sources + 1], the index of the first record of each source, and the number of all records.
      is_gather: whether `read` only copies rows from memory or from memory-mapped files.
      gather: the reader of the records, if their places can be found before they are read; None if not.
    """

    def __init__(self, sources: Sequence[Source], copied: int = 128 << 20):
        self.sources = list(sources)
        self.starts = np.concatenate([[0], np.cumsum([len(source) for source in self.sources], dtype=np.int64)])
        self.is_gather = all(getattr(source, "is_gather", False) for source in self.sources)
        self.gather = gather_of(self.sources, copied)
        self._joined = _joined(self.sources)

    def __reduce__(self) -> Any:
        return ConcatSource, (self.sources, 0)  # worker processes share the memory of the sources

    def __len__(self) -> int:
        """Return the number of all records."""
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
        """Return what each source says of itself, with its number of records."""
        counts = np.diff(self.starts)
        return " + ".join(f"{count} × {describe_source(source)}" for count, source in zip(counts, self.sources, strict=True))


def _joined(sources: Sequence[Source]) -> Source | None:
    """Return one source with the records of all sources, if their class knows how to join them."""
    kind = type(sources[0])
    join = getattr(kind, "joined", None) if all(type(source) is kind for source in sources) else None
    return None if join is None else join(sources)


def _merged_records(parts: Sequence[tuple[int, np.ndarray, Any]], count: int) -> list[Record]:
    records: list[Record] = [None] * count
    for _, rows, data in parts:
        for row, record in zip(rows.tolist(), data if isinstance(data, list) else unstack(data, len(rows)), strict=True):
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
