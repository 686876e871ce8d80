"""Apply functions of the user to host batches, or to single records: `Transform` and `per_record`.

Random numbers depend on the step and the row, never on workers.

`ReuseCheck` and `RecordReuseCheck` find functions that write a batch, or a record, into the memory of an earlier one, whose
values are then lost. Only the first few batches are checked. The first batch is kept for the comparison, so its memory cannot be
given to another array. A constant that every batch shares is allowed.
"""

from __future__ import annotations

import contextlib
import inspect
import pkgutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from penstock.data.tree import Batch, Record, leaves_with_names

_BATCHES = 8  # that are compared: a function may have several buffers, and fill them in turn


@dataclass(frozen=True)
class per_record:  # noqa: N801 - used like a function: transform=ps.per_record(decode)
    """A `transform` of a Loader that applies a function to each record, such as decoding an image or tokenising a text.

    The loader calls the function once for each record, on its workers, and collates the results.

    Args:
      fn: a function from a record (a pytree without the batch dimension) to a record. It may change the dicts and lists of its
        record. It may write to the arrays too, unless they belong to the user's own objects (a list of records, a torch
        `Dataset`). It must return new arrays for each record, and not fill one buffer again and again. If it has a parameter
        named `rng`, it gets a NumPy generator seeded by (seed, step, row of the global batch). So the same record in the same
        step gets the same random numbers, for any number of workers and processes.

    Raises:
      TypeError: `fn` is not callable.

    Examples:
      >>> loader = ps.Loader({"x": np.arange(4)}, 2, transform=ps.per_record(lambda r: {"x": r["x"] * 10}))
      >>> loader[0]["x"].tolist()
      [0, 10]
    """

    fn: Callable[..., Record]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"per_record needs a function of one record, got {type(self.fn).__name__}")

    def __reduce__(self) -> Any:
        # As a decorator, it has the name of its function, by which pickle would look for the function.
        name = f"{getattr(self.fn, '__module__', '')}:{getattr(self.fn, '__qualname__', '')}"
        with contextlib.suppress(ImportError, AttributeError, ValueError):
            if pkgutil.resolve_name(name) is self:
                return pkgutil.resolve_name, (name,)
        return per_record, (self.fn,)


class Transform:
    """A transform of the user, with its random numbers.

    If the function has a parameter named `rng`, it gets a `numpy.random.Generator` seeded by (seed, step, row of the global
    batch). For a batch, this is the first row of this process.

    Attributes:
      each_record: whether the function takes one record, rather than a batch.
    """

    def __init__(self, fn: Callable[..., Any] | per_record, seed: int):
        self._given = fn
        self.each_record = isinstance(fn, per_record)
        self._fn: Callable[..., Any] = fn.fn if isinstance(fn, per_record) else fn
        if not callable(self._fn):
            raise TypeError(f"transform={fn!r} is not a function from a batch to a batch")
        self._seed = seed
        self._takes_rng = _takes_rng(self._fn)
        self._reuse = RecordReuseCheck()

    def __reduce__(self) -> Any:
        return Transform, (self._given, self._seed)

    def batch(self, batch: Batch, step: int, row: int) -> Batch:
        """Apply the function to a batch whose first row is `row` of the global batch."""
        return self._call(batch, step, row)

    def records(
        self, records: Sequence[Record], indices: Sequence[Any] | np.ndarray, step: int, rows: np.ndarray
    ) -> list[Record]:
        """Apply the function to each record of the global batch `step`.

        Args:
          indices: names of the records in errors.
          rows: int64 [n], their rows in the global batch.
        """
        results: list[Record] = []
        for i, (record, row) in enumerate(zip(records, rows.tolist(), strict=True)):
            try:
                results.append(self._call(record, step, row))
                if i == 0:
                    first = self._reuse.copies(results[0])
                elif i == 1:
                    self._reuse.compare(first)
            except Exception as error:
                error.add_note(f"penstock: at record {indices[i]}, which is row {row} of the batch")
                raise
        return results

    def _call(self, data: Any, step: int, row: int) -> Any:
        if self._takes_rng:
            return self._fn(data, rng=np.random.default_rng([self._seed, step, row]))
        return self._fn(data)


def _takes_rng(fn: Callable[..., Any]) -> bool:
    if isinstance(fn, partial):
        return "rng" not in fn.keywords and _takes_rng(fn.func)
    try:
        return "rng" in inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False


@dataclass(frozen=True)
class _First:
    """The first batch of a run: its step, and its arrays in memory by name, each with a checksum of its values."""

    step: int
    leaves: dict[str, tuple[np.ndarray, int]]


class ReuseCheck:
    """A check of the first batches of a run. Several threads may call it."""

    def __init__(self) -> None:
        self._first: _First | None = None
        self._left = _BATCHES

    def __call__(self, step: int, batch: Batch, function: str) -> None:
        """Compare a batch with the first one. Raise ValueError if the function that made it wrote to an array of the first."""
        if self._left <= 0:
            return
        self._left -= 1
        arrays = {name: leaf for name, leaf in leaves_with_names(batch) if isinstance(leaf, np.ndarray)}
        first = self._first
        if first is None:
            self._first = _First(step, {name: (leaf, _checksum(leaf)) for name, leaf in arrays.items()})
            return
        for name, leaf in arrays.items():
            old, checksum = first.leaves.get(name, (None, 0))
            if old is not None and np.may_share_memory(old, leaf) and _checksum(old) != checksum:
                self._left = _BATCHES  # so that the next one is refused too
                raise ValueError(
                    f"batch {step}: {function} returned leaf {name!r} in the memory of batch {first.step}, whose values have "
                    "changed since then. Batches are made ahead of time, so earlier ones may still be needed: return a new array "
                    "each time (without out=), or a copy"
                )
        if not self._left:
            self._first = None


class RecordReuseCheck:
    """A check that a function of one record does not write to its result for the record before, in the first batches."""

    def __init__(self) -> None:
        self._left = _BATCHES

    def copies(self, record: Record) -> list[tuple[str, np.ndarray, bytes]]:
        """Return the arrays of the first record of a batch, by name, each with a copy of its values."""
        if self._left <= 0:
            return []
        self._left -= 1
        arrays = [(name, leaf) for name, leaf in leaves_with_names(record) if type(leaf) is np.ndarray]
        return [(name, leaf, leaf.tobytes()) for name, leaf in arrays if not leaf.dtype.hasobject]

    def compare(self, copies: list[tuple[str, np.ndarray, bytes]]) -> None:
        """Raise ValueError if the first record differs from its copy, after the function has returned the second."""
        for name, leaf, values in copies:
            if leaf.tobytes() != values:
                self._left = _BATCHES  # so that the next batch is refused too
                raise ValueError(
                    f"the function of ps.per_record wrote to leaf {name!r} that it had returned for the record before, so the "
                    "records of a batch would have the same values: return a new array each time (without out=), or a copy"
                )


def _checksum(array: np.ndarray) -> int:
    return 0 if array.dtype.hasobject else zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
