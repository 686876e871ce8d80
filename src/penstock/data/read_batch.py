"""Read one host batch: the rows of this process at a step, read, transformed, collated and checked.

`BatchReader` is a pure function of the step. `batch_producers` runs it ahead of time, on threads or worker processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from penstock._clock import Clock
from penstock._pipeline import Exhausted, Producers
from penstock.data.collate import MASK, add_mask, pad_to, stack
from penstock.data.concatenation import Gather
from penstock.data.order.batch_order import Block, Order
from penstock.data.order.rows import Rows
from penstock.data.records import RecordSource
from penstock.data.source import Source
from penstock.data.transform import ReuseCheck, Transform
from penstock.data.tree import Batch, Record, as_records, describe_array, is_sparse, leaves_with_names, to_arrays
from penstock.data.worker_processes import ProcessPool, ReadBatch, Workers


@dataclass
class BatchReader:
    """The pure function from a step to a host batch. Each worker process gets a copy of it.

    Attributes:
      order: says which records each step has.
      transform: applied to each record, or to the batch.
      collate: from a list of records to a batch; None stacks.
      reads: the rows of this process, which are read.
    """

    source: Source
    order: Order
    transform: Transform | None
    collate: Callable[[Sequence[Record]], Batch] | None
    reads: Rows
    _first: tuple[int, Any] | None = field(default=None, repr=False)  # a step and the structure of its batch
    _places: tuple[Block, list[np.ndarray]] | None = field(default=None, repr=False)  # of the records of a block of steps
    _reuse: ReuseCheck | None = field(default_factory=ReuseCheck, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # JAX's structures of user-defined nodes cannot be pickled. A worker process sends a copy of each batch before it makes
        # the next one, so functions may use memory again.
        return self.__dict__ | {"_first": None, "_places": None, "_reuse": None}

    def __call__(self, step: int, clock: Clock) -> Batch:
        """Read the rows of this process in the global batch `step`. Add the time of each part to the clock."""
        rows = self.reads.numbers(self.order.padded_rows(step))
        with clock.time("read"):
            block, k = self.order.block(step, self.reads)
            indices = block.indices[k]
            data = self._read(step, block, k)
            if isinstance(data, list):
                data = self._copy_containers(data)
            elif self.transform is not None:
                data = to_arrays(data)  # in native byte order, which other libraries need
        if self.transform and self.transform.each_record:
            with clock.time("transform"):
                data = self._noting(step, self.transform.records, as_records(data, len(indices)), indices, step, rows)
        if self.collate is not None or isinstance(data, list):
            with clock.time("collate"):
                data = self._noting(step, self._collated, as_records(data, len(indices)), step)
        if self.transform and not self.transform.each_record:
            with clock.time("transform"):
                data = self._noting(step, self.transform.batch, data, step, int(rows[0]))
        batch = self._checked(step, data, len(indices))
        if self._reuse is not None and (self.transform is not None or self.collate is not None or not self.from_memory):
            self._reuse(step, batch, self._last_function())
        if self.order.remainder != "pad":
            return batch
        return add_mask(batch, MASK, rows < self.order.rows(step), "remainder='pad'")

    def _collated(self, records: list[Record], step: int) -> Batch:
        if isinstance(self.collate, pad_to) and self.knows_longest:
            return self.collate(records, longest=self.order.longest(step, self.reads))
        return stack(records) if self.collate is None else self.collate(records)

    @property
    def knows_longest(self) -> bool:
        """Tell whether `collate` pads to a length that is chosen by the longest record of the global batch."""
        one_choice = isinstance(self.collate, pad_to) and self.collate.has_choice and len(self.collate.lengths) == 1
        return one_choice and self.order.lengths is not None

    @property
    def from_memory(self) -> bool:
        """Tell whether the records are rows of arrays in memory or in memory-mapped files, so that reading waits for nothing."""
        return bool(getattr(self.source, "is_gather", False))

    def _read(self, step: int, block: Block, k: int) -> Batch | list[Record]:
        """Read the records of step k of a block, and check that there are as many as indices."""
        indices = block.indices[k]
        try:
            gather = getattr(self.source, "gather", None)
            if isinstance(gather, Gather):
                data = gather.read(self._places_of(gather, block, k))
            else:
                data = self.source.read(indices.copy())  # it may return them as data, which a transform may write to
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

    def _places_of(self, gather: Gather, block: Block, k: int) -> list[np.ndarray]:
        """Return where the records of step k of a block lie, for each leaf. Places are found for a block of steps at once."""
        found = self._places  # several threads may replace it at the same time; each uses the places that it read or found itself
        if found is None or found[0] is not block:
            found = self._places = (block, gather.places(block.indices))
        return [places[k] for places in found[1]]

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
        if not all(type(leaf) is np.ndarray and leaf.dtype.isnative and not leaf.dtype.hasobject for leaf in leaves):
            batch = self._noting(step, to_arrays, batch)
            leaves, structure = jax.tree_util.tree_flatten(batch, is_sparse)
            self._check_objects(step, batch)
        if not all(leaf.ndim and leaf.shape[0] == rows for leaf in leaves):
            named = leaves_with_names(batch, is_sparse)
            name, leaf = next((n, x) for n, x in named if x.ndim == 0 or x.shape[0] != rows)
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
            if wrong := [type(x).__name__ for x in leaf.ravel() if not isinstance(x, (str, bytes))]:
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


class StepReader(Protocol):
    """A function from a step to a host batch."""

    def __call__(self, step: int, clock: Clock) -> Batch:
        """Read the batch of a step, and add the time of each part to the clock."""


def batch_producers(reader: StepReader, workers: Workers, start: int, stop: float, clocks: Sequence[Clock]) -> Producers:
    """Return the producers of the batches `start … stop - 1` for a `PrefetchPipeline`.

    Args:
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
        return Producers(works, inline=workers.kind == "none" and isinstance(reader, BatchReader) and reader.from_memory)
    pool = ProcessPool(reader, len(clocks))
    works = [partial(work, read=read, clock=clock) for read, clock in zip(pool.readers, clocks, strict=True)]
    return Producers(works, interrupt=pool.kill, cleanup=pool.release)
