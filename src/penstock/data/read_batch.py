"""From a step number to a host batch: read, transform, collate, check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from penstock._clock import Clock
from penstock.data.collate import add_mask, stack
from penstock.data.order import Order
from penstock.data.records import RecordSource
from penstock.data.source import Source
from penstock.data.transform import Transform
from penstock.data.tree import Batch, Record, describe_array, leaves_with_names, to_numpy, unstack


@dataclass
class BatchReader:
    """The pure function of a Loader. It is what worker processes get a copy of.

    Attributes:
      process: (index, count): process p of n loads rows `p·B/n … (p+1)·B/n` of each global batch.
    """

    source: Source
    order: Order
    transform: Transform | None
    collate: Callable[[Sequence[Record]], Batch] | None
    process: tuple[int, int]
    _first: tuple[int, Any] | None = field(default=None, repr=False)  # a step and the structure it had

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_first": None}  # JAX's structures of user-defined nodes do not pickle

    def __call__(self, step: int, clock: Clock) -> Batch:
        """This process's rows of the global batch `step`; the time that each part took goes to the clock."""
        start, stop = self._rows(step)
        with clock.time("read"):
            indices = self._indices(step, start, stop)
            data = self._read(step, indices)
            if isinstance(data, list):
                data = self._own(data)
        if self.transform and self.transform.each_record:
            with clock.time("transform"):
                data = self._noting(step, self.transform.records, _records(data, len(indices)), indices, step, start)
        if self.collate is not None or isinstance(data, list):
            with clock.time("collate"):
                data = self._noting(step, stack if self.collate is None else self.collate, _records(data, len(indices)))
        if self.transform and not self.transform.each_record:
            with clock.time("transform"):
                data = self._noting(step, self.transform.batch, data, step, start)
        batch = self._checked(step, data, len(indices))
        if self.order.remainder != "pad":
            return batch
        return add_mask(batch, "mask", np.arange(start, stop) < self.order.rows(step), "remainder='pad'")

    @property
    def gathers(self) -> bool:
        """Whether all it does is to copy rows: no code of the user's runs, and nothing waits for long."""
        return self.transform is None and self.collate is None and getattr(self.source, "gathers", False)

    def _rows(self, step: int) -> tuple[int, int]:
        rows, (index, count) = self.order.rows(step), self.process
        if self.order.remainder == "pad":
            rows = self.order.batch_size
        return index * rows // count, (index + 1) * rows // count

    def _indices(self, step: int, start: int, stop: int) -> np.ndarray:
        """Record indices of rows `start … stop`; rows past the last record repeat it."""
        rows = self.order.rows(step)
        if stop <= rows:
            return self.order.indices(step, start, stop)
        real = self.order.indices(step, start, rows) if start < rows else np.empty(0, np.int64)
        last = self.order.indices(step, rows - 1, rows)
        return np.concatenate([real, last.repeat(stop - max(start, rows))])

    def _read(self, step: int, indices: np.ndarray) -> Batch | list[Record]:
        try:
            data = self.source.read(indices)
        except Exception as error:
            error.add_note(f"penstock: while reading batch {step}{_failing_record(self.source, indices)}")
            raise
        try:
            rows = [len(data)] if isinstance(data, list) else [x.shape[0] for x in jax.tree_util.tree_leaves(data)]
        except (AttributeError, IndexError):
            leaf, what = next((n, x) for n, x in leaves_with_names(data) if not getattr(x, "shape", None))
            raise TypeError(
                f"{type(self.source).__name__}.read returned leaf {leaf!r} as {type(what).__name__} without rows, for batch "
                f"{step}: it needs to return a pytree of arrays [{len(indices)}, ...], or a list of {len(indices)} records"
            ) from None
        if wrong := [n for n in rows if n != len(indices)]:
            name = type(self.source).__name__
            raise ValueError(f"{name}.read was given {len(indices)} indices and returned {wrong[0]} rows, for batch {step}")
        return data

    def _own(self, records: list[Record]) -> list[Record]:
        """Records whose containers a user's function may change: those of a list, say, are read again next epoch."""
        changed = self.collate is not None or (self.transform is not None and self.transform.each_record)
        if not changed or not isinstance(self.source, RecordSource):
            return records
        return [jax.tree_util.tree_map(lambda leaf: leaf, record) for record in records]

    def _noting(self, step: int, fn: Callable[..., Any], *args: Any) -> Any:
        try:
            return fn(*args)
        except Exception as error:
            error.add_note(f"penstock: while making batch {step}")
            raise

    def _checked(self, step: int, batch: Batch, rows: int) -> Batch:
        """The batch with NumPy (or JAX) leaves, after a look at its structure and leading dimensions."""
        leaves, structure = jax.tree_util.tree_flatten(batch)
        if not all(type(leaf) is np.ndarray and not leaf.dtype.hasobject for leaf in leaves):
            leaves = [to_numpy(leaf) for leaf in leaves]
            batch = jax.tree_util.tree_unflatten(structure, leaves)
            self._check_objects(step, batch)
        if not all(leaf.ndim and leaf.shape[0] == rows for leaf in leaves):
            name, leaf = next((n, x) for n, x in leaves_with_names(batch) if x.ndim == 0 or x.shape[0] != rows)
            raise ValueError(
                f"batch {step}: {self._maker()} returned leaf {name!r} as {describe_array(leaf)}; every leaf needs the "
                f"batch's {rows} rows as its first dimension"
            )
        # Any thread may set it first; each compares with a structure that some batch had.
        first = self._first = self._first or (step, structure)
        if structure != first[1] or not leaves:
            raise ValueError(
                f"batch {step}: {self._maker()} returned the structure {structure}"
                + (f", but {first[1]} for batch {first[0]}: it must not depend on the records" if leaves else ", without arrays")
            )
        return batch

    def _check_objects(self, step: int, batch: Batch) -> None:
        """TypeError for an array of Python objects; strings and bytes may stay on the host, as a text to print, say."""
        for name, leaf in leaves_with_names(batch):
            if not isinstance(leaf, np.ndarray) or not leaf.dtype.hasobject:
                continue
            wrong = [type(x).__name__ for x in leaf.ravel() if not isinstance(x, (str, bytes))]
            if wrong:
                raise TypeError(
                    f"batch {step}: {self._maker()} returned leaf {name!r} as an array of Python objects ({wrong[0]}), which no "
                    "device can hold: make numbers of it in the transform, or leave it out"
                )

    def _maker(self) -> str:
        """What made the batch, for an error."""
        if self.transform is not None and not self.transform.each_record:
            return "the transform"
        if self.collate is not None:
            return "collate"
        return "the transform" if self.transform is not None else f"{type(self.source).__name__}.read"


def _records(data: Batch | list[Record], rows: int) -> list[Record]:
    return data if isinstance(data, list) else unstack(data, rows)


def _failing_record(source: Source, indices: np.ndarray) -> str:
    """Which record a batched read fails at, found by reading the batch again in halves."""
    if isinstance(source, RecordSource) and not source.batched:
        return ""  # it has said so itself
    if not _fails(source, indices):
        return " (which succeeds when it is read again)"
    while len(indices) > 1:
        half = indices[: len(indices) // 2]
        indices = half if _fails(source, half) else indices[len(indices) // 2 :]
    return f", at record {indices[0]}" if _fails(source, indices) else ", though not at one record alone"


def _fails(source: Source, indices: np.ndarray) -> bool:
    try:
        source.read(indices)
    except Exception:
        return True
    return False
