"""Read one host batch: from a step number to the rows of this process, read, transformed, collated and checked.

`BatchReader` is a pure function of the step. `batch_producers` runs it ahead of time, on threads or worker processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from penstock._clock import Clock
from penstock._producers import Exhausted, Producers
from penstock.data.collate import add_mask, stack
from penstock.data.order import Order
from penstock.data.process_rows import process_rows, record_indices
from penstock.data.records import RecordSource
from penstock.data.source import Source
from penstock.data.transform import Transform
from penstock.data.tree import Batch, Record, describe_array, leaves_with_names, to_numpy, unstack
from penstock.data.worker_processes import ProcessPool, ReadBatch, Workers


@dataclass
class BatchReader:
    """The pure function from a step to a host batch. Each worker process gets a copy of it.

    Attributes:
      source: the records.
      order: the records of each step.
      transform: applied to each record, or to the batch.
      collate: from a list of records to a batch; None stacks.
      process: (index, count) of the process whose rows are read, see `process_rows`.
    """

    source: Source
    order: Order
    transform: Transform | None
    collate: Callable[[Sequence[Record]], Batch] | None
    process: tuple[int, int]
    _first: tuple[int, Any] | None = field(default=None, repr=False)  # a step and the structure of its batch

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_first": None}  # JAX's structures of user-defined nodes cannot be pickled

    def __call__(self, step: int, clock: Clock) -> Batch:
        """Read the rows of this process in the global batch `step`. Add the time of each part to the clock."""
        start, stop = process_rows(self.order, step, self.process)
        with clock.time("read"):
            indices = record_indices(self.order, step, start, stop)
            data = self._read(step, indices)
            if isinstance(data, list):
                data = self._copy_containers(data)
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
    def is_gather(self) -> bool:
        """Tell whether it only copies rows, so that no user code runs and nothing waits for long."""
        return self.transform is None and self.collate is None and getattr(self.source, "is_gather", False)

    def _read(self, step: int, indices: np.ndarray) -> Batch | list[Record]:
        """Read the records, and check that there are as many as indices."""
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

    def _copy_containers(self, records: list[Record]) -> list[Record]:
        """Copy the dicts and lists of records if a function of the user may change them.

        The user's own list of records, for example, is read again in the next epoch.
        """
        may_change = self.collate is not None or (self.transform is not None and self.transform.each_record)
        if not may_change or not isinstance(self.source, RecordSource):
            return records
        return [jax.tree_util.tree_map(lambda leaf: leaf, record) for record in records]

    def _noting(self, step: int, fn: Callable[..., Any], *args: Any) -> Any:
        """Call a function, and add the step to its error."""
        try:
            return fn(*args)
        except Exception as error:
            error.add_note(f"penstock: while making batch {step}")
            raise

    def _checked(self, step: int, batch: Batch, rows: int) -> Batch:
        """Check structure and leading dimensions of a batch, and return it with NumPy (or JAX) leaves."""
        leaves, structure = jax.tree_util.tree_flatten(batch)
        if not all(type(leaf) is np.ndarray and not leaf.dtype.hasobject for leaf in leaves):
            leaves = [to_numpy(leaf) for leaf in leaves]
            batch = jax.tree_util.tree_unflatten(structure, leaves)
            self._check_objects(step, batch)
        if not all(leaf.ndim and leaf.shape[0] == rows for leaf in leaves):
            name, leaf = next((n, x) for n, x in leaves_with_names(batch) if x.ndim == 0 or x.shape[0] != rows)
            raise ValueError(
                f"batch {step}: {self._last_function()} returned leaf {name!r} as {describe_array(leaf)}; every leaf needs the "
                f"batch's {rows} rows as its first dimension"
            )
        # Several threads may set it at the same time. Each compares with the structure of some batch, so any of them is right.
        first = self._first = self._first or (step, structure)
        if structure != first[1] or not leaves:
            raise ValueError(
                f"batch {step}: {self._last_function()} returned the structure {structure}"
                + (f", but {first[1]} for batch {first[0]}: it must not depend on the records" if leaves else ", without arrays")
            )
        return batch

    def _check_objects(self, step: int, batch: Batch) -> None:
        """Raise TypeError for an array of Python objects. Strings and bytes are allowed: they may stay on the host."""
        for name, leaf in leaves_with_names(batch):
            if not isinstance(leaf, np.ndarray) or not leaf.dtype.hasobject:
                continue
            wrong = [type(x).__name__ for x in leaf.ravel() if not isinstance(x, (str, bytes))]
            if wrong:
                raise TypeError(
                    f"batch {step}: {self._last_function()} returned leaf {name!r} as an array of Python objects ({wrong[0]}), "
                    "which no device can hold: make numbers of it in the transform, or leave it out"
                )

    def _last_function(self) -> str:
        """Name the function that returned the batch, for an error."""
        if self.transform is not None and not self.transform.each_record:
            return "the transform"
        if self.collate is not None:
            return "collate"
        return "the transform" if self.transform is not None else f"{type(self.source).__name__}.read"


def _records(data: Batch | list[Record], rows: int) -> list[Record]:
    return data if isinstance(data, list) else unstack(data, rows)


def _failing_record(source: Source, indices: np.ndarray) -> str:
    """Find the record at which a batched read fails, by reading the batch again in halves."""
    if isinstance(source, RecordSource) and not source.batched:
        return ""  # its own error names the record
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


def batch_producers(reader: BatchReader, workers: Workers, start: int, stop: float, clocks: Sequence[Clock]) -> Producers:
    """Return the producers of the batches `start … stop - 1` for a `PrefetchPipeline`.

    Args:
      reader: reads one batch.
      workers: whether the batches are read on one thread, on several threads, or in worker processes.
      start: step of item 0.
      stop: steps in all, `math.inf` if they do not end.
      clocks: one for each worker.
    """

    def work(number: int, read: ReadBatch, clock: Clock) -> Batch:
        if start + number >= stop:
            raise Exhausted
        return read(start + number, clock)

    if workers.kind != "process":
        works = [partial(work, read=reader, clock=clock) for clock in clocks]
        return Producers(works, may_run_inline=workers.kind == "none" and reader.is_gather)
    pool = ProcessPool(reader, len(clocks))
    works = [partial(work, read=read, clock=clock) for read, clock in zip(pool.readers, clocks, strict=True)]
    return Producers(works, interrupt=pool.kill, cleanup=pool.release)
