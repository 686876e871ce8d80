"""Functions on host batches, and record functions lifted to batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from penstock.data.tree import Batch, Record


@dataclass(frozen=True)
class per_record:  # noqa: N801 - used like a function: transform=ps.per_record(decode)
    """Lift a function of one record to a `transform` of a Loader: decode an image, tokenise a text.

    The loader calls it once for each record, on its workers, and collates what it returns.

    Args:
      fn: from a record (a pytree without the batch dimension) to a record. It may change the containers of
        the record it gets; the arrays in it are its own too, unless they are leaves of a user's own objects (of
        a list of records, a torch `Dataset`), which must not be written to. If it has a parameter
        named `rng`, it gets a NumPy generator seeded by (seed, step, row of the global batch): the
        same numbers for the same record of the same step, whatever the number of workers or processes.

    Example:
      >>> loader = ps.Loader({"x": np.arange(4)}, 2, transform=ps.per_record(lambda r: {"x": r["x"] * 10}))
      >>> loader[0]["x"].tolist()
      [0, 10]
    """

    fn: Callable[..., Record]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"per_record needs a function of one record, got {type(self.fn).__name__}")


class Transform:
    """A user's transform with its random numbers.

    A function that takes a parameter named `rng` gets `numpy.random.Generator`s seeded by
    (seed, step, row of the global batch), for a whole batch by the first of this process's rows.
    """

    def __init__(self, fn: Callable[..., Any] | per_record, seed: int):
        self.each_record = isinstance(fn, per_record)
        self._fn: Callable[..., Any] = fn.fn if isinstance(fn, per_record) else fn
        if not callable(self._fn):
            raise TypeError(f"transform={fn!r} is no function from a batch to a batch")
        self._seed = seed
        self._takes_rng = _takes_rng(self._fn)

    def batch(self, batch: Batch, step: int, row: int) -> Batch:
        return self._call(batch, step, row)

    def records(self, records: Sequence[Record], indices: np.ndarray, step: int, row: int) -> list[Record]:
        made = []
        for i, record in enumerate(records):
            try:
                made.append(self._call(record, step, row + i))
            except Exception as error:
                error.add_note(f"penstock: at record {indices[i]}, which is row {row + i} of the batch")
                raise
        return made

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
