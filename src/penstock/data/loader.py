"""Give random access to the host batches of a training run: `Loader`.

A batch is a pure function of its step: `order` computes which records it has and which rows this process needs, and `read_batch`
reads them.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
import pickle
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import Sharding

from penstock._arguments import at_least
from penstock._clock import Clock
from penstock._pipeline import Exhausted, PrefetchPipeline, Producers
from penstock.data.arrays import ArraySource, refuse_objects
from penstock.data.collate import MASK, add_mask, pad_to
from penstock.data.concatenation import ConcatSource, check_alike, record_specs
from penstock.data.order.batch_order import Order, RecordSequence, Remainder, Shuffled, Weighted
from penstock.data.order.mixture import MixedSequence, Mixture
from penstock.data.order.rows import Rows, device_rows, index_and_count, slice_rows
from penstock.data.read_batch import BatchReader, batch_producers
from penstock.data.source import Source, as_source, describe_source
from penstock.data.transform import Transform, per_record
from penstock.data.tree import Batch, Record, as_records, describe_array, leaves_with_names
from penstock.data.worker_processes import Workers

_WINDOW = 64  # batches that batch_by_length sorts together
_LENGTHS_AT_ONCE = 1024  # records that are read at once to see their lengths

_NO_LIST_OF_ARRAYS = ". A list holds one record an item: arrays with one row a record are given as a tuple or dict"


class Loader:
    """Random access to the batches of a training run: `loader[step]` is always the same batch.

    The batch does not depend on the machine, the process, the number of workers, or the batches that were read before. So the
    position of a run in its data is one integer, and step 10^9 costs as much as step 0.

    Iteration gives the batches from step 0 on. `ps.feed(loader)` reads them in the background, puts them on the devices, and can
    start at any step.

    Args:
      data: a pytree of arrays, files, a table, a data set, a list of records, a `Source` (see `penstock.data.as_source`), or a
        mixture (`ps.mix`).
      batch_size: records in the *global* batch, over all processes.
      shuffle: whether to visit the records in a new order in each epoch, each record once. It is not a buffer: the order of all
        records is computed.
      seed: selects the orders and the random numbers of transforms, >= 0.
      epochs: how often to go through the data; None for no end.
      transform: a function from a host batch (NumPy leaves [B, ...]) to a host batch with the same B. It must return new arrays
        each time, and not fill one buffer (`out=`) again: batches are made ahead of time. If it has a parameter named
        `rng`, it gets a NumPy generator seeded by (seed, step, first row of this process). So its random numbers depend on the
        rows that this process reads. Or `ps.per_record(fn)`, whose random numbers do not.
      collate: a function from a list of records to a new batch; `ps.pad_to(lengths)` pads. None stacks.
      remainder: what happens to the last records of an epoch if `batch_size` does not divide their number. "drop" leaves them
        out. "pad" repeats the last record, and adds a boolean leaf `mask` [B] to every batch, which must be a dict. "keep" makes
        a shorter batch.
      workers: None reads on the thread that iterates. Inside of a feed, this is the thread of the feed; or, if the data are
        arrays or Arrow columns and a second thread saves no time, the thread that calls `next()`. N reads N batches at once on
        threads; the source and the transform must be safe to call from several threads. "process:N" uses N spawned processes,
        for Python code that holds the interpreter lock.
      process: (index, count) of this process; None asks JAX, which starts its backend. Process p of n reads the rows
        `p·B/n … (p+1)·B/n` of each global batch. But `ps.feed(loader, to=sharding)` reads the rows that the devices of this
        process need, if the sharding is over several processes.
      weights: numbers [N] >= 0, one for each record, with `shuffle=True`. An epoch then has N draws: a record with the share w
        of all weights is drawn ⌊N·w⌋ or ⌈N·w⌉ times. None reads each record once.
      batch_by_length: the length of each record, integers [N]; or the name of a leaf, whose lengths are read once, here. Records
        of similar length then share a batch, which `collate=ps.pad_to(...)` pads less: the records of 64 batches are sorted by
        length before they are cut into batches, and these batches are shuffled. None ignores lengths.

    Raises:
      ValueError, TypeError: at once, if the arguments do not fit each other or the data.

    Examples:
      >>> loader = ps.Loader({"x": np.arange(10)}, batch_size=4, shuffle=True, seed=1, epochs=2)
      >>> len(loader), loader[3]["x"].shape
      (4, (4,))
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epochs: int | None = None,
        transform: Callable[..., Batch] | per_record | None = None,
        collate: Callable[[Sequence[Record]], Batch] | None = None,
        remainder: Remainder = "drop",
        workers: int | str | None = None,
        process: tuple[int, int] | None = None,
        weights: Any = None,
        batch_by_length: Any = None,
    ):
        source = as_source(data)
        self.batch_size = at_least(1, "batch_size", batch_size)
        self.epochs = None if epochs is None else at_least(1, "epochs", epochs)
        self.workers = Workers.parse(workers)
        seed = at_least(0, "seed", seed)
        if remainder not in get_args(Remainder):
            raise ValueError(f"remainder={remainder!r}: choose from {', '.join(get_args(Remainder))}")
        if collate is not None and not callable(collate):
            raise TypeError(f"collate={collate!r} is not a function from a list of records to a batch")
        shuffle = _is_shuffled(shuffle)
        self._order = Order(
            _sequence(source, self.batch_size, remainder, shuffle, seed, weights, self.epochs is None),
            self.batch_size,
            remainder,
            None if batch_by_length is None else record_lengths(source, batch_by_length),
            _WINDOW,
            seed if shuffle else None,
        )
        self._given_process = None if process is None else index_and_count(process)
        wrapped = None if transform is None else Transform(transform, seed)
        self._reader = BatchReader(source, self._order, wrapped, collate, Rows({}))
        _check(self._reader)
        if process is not None:
            self._local  # noqa: B018 - raises at once if the batches cannot be divided
        if self.workers.kind == "process":
            _check_pickles(self._reader)

    @property
    def collate(self) -> Callable[[Sequence[Record]], Batch] | None:
        """Return the function from a list of records to a batch; None if records are stacked."""
        return self._reader.collate

    @cached_property
    def process(self) -> tuple[int, int]:
        """Return (index, count) of this process."""
        return self._given_process or (jax.process_index(), jax.process_count())

    @cached_property
    def _local(self) -> BatchReader:
        """Return the reader of the rows of this process: its slice of each global batch."""
        return self._reading(slice_rows(self.batch_sizes, self.process))

    def _reading(self, rows: Rows) -> BatchReader:
        collate = self._reader.collate
        if isinstance(collate, pad_to) and collate.has_choice and not rows.cover_all and not self._reader.knows_longest:
            raise ValueError(
                f"pad_to with several lengths in {self.process[1]} processes: each would choose by its own records, and batches "
                "of different shapes hang the first collective; give it one length, or one list of lengths for all leaves with "
                "batch_by_length=, by which all processes choose alike"
            )
        return dataclasses.replace(self._reader, reads=rows)

    def for_shardings(self, shardings: Sequence[Sharding]) -> tuple[Loader, Rows]:
        """Return a Loader that reads the rows that the devices of this process need, and these rows.

        Args:
          shardings: of the leaves of a batch, over the devices of several processes. Only the first dimension counts.

        Raises:
          TypeError: the rows of a sharding are unknown.
          ValueError: `process` was given, and JAX has another; a batch does not divide over a sharding.
        """
        here = (jax.process_index(), jax.process_count())
        if self.process != here:
            raise ValueError(
                f"the Loader was made with process={self.process}, and this is process {here[0]} of {here[1]}: leave it out, as "
                "the sharding says which rows a process reads"
            )
        rows = device_rows(self.batch_sizes, shardings, here[0])
        loader = copy.copy(self)
        loader.__dict__["_local"] = self._reading(rows)
        return loader, rows

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of global batches in one epoch."""
        return self._order.steps_per_epoch

    @property
    def copies_rows(self) -> bool:
        """Tell whether a batch is a copy of rows of arrays, made by no function of the user."""
        return self._reader.from_memory and self._reader.transform is None and self._reader.collate is None

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Return the different sizes of global batches: `batch_size`, and the size of a shorter last batch that is kept."""
        return self._order.batch_sizes

    def __len__(self) -> int:
        """Return the number of global batches in all epochs.

        Raises:
          TypeError: `epochs` is None.
        """
        if self.epochs is None:
            raise TypeError("a Loader with epochs=None goes on for ever and has no length; see steps_per_epoch")
        return self.epochs * self.steps_per_epoch

    @property
    def _steps(self) -> float:
        """Return the number of global batches in all epochs, which may be larger than `len` allows, or infinite."""
        return math.inf if self.epochs is None else self.epochs * self.steps_per_epoch

    def __getitem__(self, step: int) -> Batch:
        """Read the rows of this process in the global batch `step`.

        Raises:
          IndexError: not 0 <= step < len(self).
        """
        step = operator.index(step)
        if not self._has(step):
            steps = "for ever" if self.epochs is None else f"for {self._steps:,} steps"
            raise IndexError(f"no step {step} in a Loader that goes on {steps} from 0")
        return self._local(step, Clock())

    def _has(self, step: int) -> bool:
        return 0 <= step < self._steps

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches from step 0 on, read ahead if there are workers."""
        if self.workers.kind == "none":
            step = 0
            while self._has(step):
                yield self[step]
                step += 1
            return
        clocks = [Clock() for _ in range(self.workers.count)]
        pipeline: PrefetchPipeline[Batch] = PrefetchPipeline(self.producers(0, clocks), capacity=2 * len(clocks))
        try:
            while True:
                yield pipeline.get()
        except Exhausted:
            return
        finally:
            pipeline.close()

    def __repr__(self) -> str:
        epochs = "for ever" if self.epochs is None else f"{self.epochs} epochs"
        source = self._reader.source
        what = repr(source) if isinstance(source, Mixture) else textwrap.shorten(describe_source(source), 80, placeholder=" …")
        steps = f"{self.steps_per_epoch:,} steps of {self.batch_size} an epoch"
        return f"Loader({len(source):,} records of {what}; {steps}, {epochs})"

    def fingerprint(self) -> dict[str, Any]:
        """Return the options that decide which records a step holds. It is compared when the state of a feed is restored.

        The numbers of processes, workers and epochs are not part of it, so they may change.
        """
        return {"source": describe_source(self._reader.source), **self._order.fingerprint()}

    def producers(self, start: int, clocks: Sequence[Clock]) -> Producers:
        """Return the producers of the batches from step `start` on, for a `PrefetchPipeline`: one for each clock."""
        return batch_producers(self._local, self.workers, start, self._steps, clocks)


def _is_shuffled(shuffle: Any) -> bool:
    if isinstance(shuffle, (bool, np.bool_)):
        return bool(shuffle)
    raise TypeError(
        f"shuffle={shuffle!r}: needs True or False. There is no shuffle buffer whose size could be given: with shuffle=True, "
        "each epoch has all records in a new order, which costs no memory"
    )


def _sequence(
    source: Source, batch_size: int, remainder: Remainder, shuffle: bool, seed: int, weights: Any, endless: bool
) -> RecordSequence:
    """Choose the order of the records."""
    records = len(source)
    if records == 0:
        raise ValueError(f"no records: {type(source).__name__} has length 0")
    if isinstance(source, Mixture):
        if weights is not None:
            raise ValueError("weights of records do not fit a mixture: give mix(sources, weights) the shares of its sources")
        return MixedSequence(source, batch_size, remainder, shuffle, seed, endless)
    if weights is None:
        return Shuffled(records, shuffle, seed)
    if not shuffle:
        raise ValueError("weights= draws records at random, which needs shuffle=True")
    return Weighted(weights, records, seed)


def _check(reader: BatchReader) -> None:
    """Raise ValueError if the options do not fit each other or the data."""
    order = reader.order
    if order.steps_per_epoch == 0:
        too_large = f"batch_size={order.batch_size} is more than the {order.records:,}"
        leaves_none = "so remainder='drop' leaves none: use a smaller batch, or remainder='pad' or 'keep'"
        if isinstance(reader.source, Mixture):
            raise ValueError(
                f"{too_large} rows of an epoch of this mixture, which ends by stop={reader.source.stop!r}, {leaves_none}; or "
                "epochs=None, which repeats all sources without end"
                + ("; or mix(..., stop='all_exhausted'), which repeats the shorter ones")
                * (reader.source.stop == "first_exhausted")
            )
        raise ValueError(f"{too_large} records, {leaves_none}" + _NO_LIST_OF_ARRAYS * (describe_source(reader.source) == "list"))
    calls_functions = reader.transform is not None or reader.collate is not None
    if not calls_functions:
        refuse_objects(reader.source)
    if order.remainder == "pad" and isinstance(reader.source, ArraySource) and not calls_functions:
        add_mask(reader.source.arrays, MASK, None, "remainder='pad'")  # every batch would fail
    parts = reader.source.source if isinstance(reader.source, Mixture) else reader.source
    pad = reader.collate if isinstance(reader.collate, pad_to) else None
    changes_records = reader.transform is not None and reader.transform.each_record
    if isinstance(parts, ConcatSource) and not changes_records and reader.collate is pad:
        check_alike(record_specs(parts.sources, pad), "Loader")


def _check_pickles(reader: BatchReader) -> None:
    """Raise ValueError if a part of the reader cannot be sent to another process, or OSError if a file of it has changed."""
    for name in ("source", "transform", "collate"):
        try:
            pickle.dumps(getattr(reader, name), protocol=5, buffer_callback=lambda _: None)
        except OSError:
            raise
        except Exception as error:
            raise ValueError(
                f"workers='process:N' sends the loader to other processes, but its {name} does not pickle ({error}): define "
                "functions at the top of a module, and open files where they are read"
            ) from error


def record_lengths(source: Source, given: Any) -> np.ndarray:
    """Return the lengths of records, int64 [N]: checked, or read as the first dimension of the leaf with this name."""
    if isinstance(given, str):
        return _read_lengths(source, given)
    lengths = np.asarray(given)
    if lengths.dtype.kind not in "iu":
        raise TypeError(
            "batch_by_length needs integers, one for each record, or the name of a leaf; got "
            f"{type(given).__name__} of {describe_array(lengths)}"
            + (": give lengths.astype(np.int64)" if lengths.dtype.kind == "f" else "")
        )
    if lengths.shape != (len(source),):
        raise ValueError(
            f"batch_by_length has the shape {lengths.shape}, and there are {len(source):,} records: one length for each"
        )
    if (lengths < 0).any():
        raise ValueError(f"batch_by_length has {int(lengths.min())} at record {int(lengths.argmin())}: lengths need to be >= 0")
    if lengths.max() > np.iinfo(np.int64).max:
        raise ValueError(
            f"batch_by_length has {lengths.max()} at record {int(lengths.argmax())}: lengths need to be less than 2**63"
        )
    return lengths.astype(np.int64)


def _read_lengths(source: Source, name: str) -> np.ndarray:
    lengths = np.empty(len(source), np.int64)
    for start in range(0, len(source), _LENGTHS_AT_ONCE):
        indices = np.arange(start, min(start + _LENGTHS_AT_ONCE, len(source)), dtype=np.int64)
        for index, record in zip(indices.tolist(), as_records(source.read(indices), len(indices)), strict=True):
            lengths[index] = _length(index, record, name)
    return lengths


def _length(index: int, record: Any, name: str) -> int:
    if isinstance(record, dict) and name in record:
        leaf = record[name]  # also a list of numbers, which JAX takes for a container
    else:
        leaves = dict(leaves_with_names(record))
        if name not in leaves:
            raise ValueError(f"batch_by_length={name!r}: record {index} has no leaf of that name; it has {list(leaves)}")
        leaf = leaves[name]
    try:
        return len(leaf)
    except TypeError:
        what = type(leaf).__name__
        raise ValueError(f"batch_by_length={name!r}: this leaf of record {index} is {what}, without a length") from None
