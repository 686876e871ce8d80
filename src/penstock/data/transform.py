"""Transforms of a Loader: functions on host batches, and functions on single records.

A batch or a list of records goes in, the same with changed leaves comes out. Random numbers depend on the step, never on workers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from penstock.data.reused_memory import RecordReuseCheck
from penstock.data.tree import Batch, Record


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


class Transform:
    """A transform of the user, with its random numbers.

    If the function has a parameter named `rng`, it gets a `numpy.random.Generator` seeded by (seed, step, row of the global
    batch). For a batch, this is the first row of this process.

    Attributes:
      each_record: whether the function takes one record, rather than a batch.
    """

    def __init__(self, fn: Callable[..., Any] | per_record, seed: int):
        self.each_record = isinstance(fn, per_record)
        self._fn: Callable[..., Any] = fn.fn if isinstance(fn, per_record) else fn
        if not callable(self._fn):
            raise TypeError(f"transform={fn!r} is not a function from a batch to a batch")
        self._seed = seed
        self._takes_rng = _takes_rng(self._fn)
        self._reuse = RecordReuseCheck()

    def batch(self, batch: Batch, step: int, row: int) -> Batch:
        """Apply the function to a batch whose first row is `row` of the global batch."""
        return self._call(batch, step, row)

    def records(
        self, records: Sequence[Record], indices: Sequence[Any] | np.ndarray, step: int, rows: np.ndarray
    ) -> list[Record]:
        """Apply the function to each record.

        Args:
          records: the records.
          indices: their names in errors.
          step: number of the global batch.
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
