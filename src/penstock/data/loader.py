"""The Loader: records in storage and options go in, a pure function from a step number to a host batch comes out.

`order` computes the order of the records, `process_rows` the rows of this process, and `read_batch` reads them.
"""

from __future__ import annotations

import math
import operator
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import jax

from penstock._arguments import at_least
from penstock._clock import Clock
from penstock._pipeline import PrefetchPipeline
from penstock._producers import Exhausted, Producers
from penstock.data.arrays import ArraySource
from penstock.data.collate import add_mask, pad_to
from penstock.data.order import Order, Remainder
from penstock.data.read_batch import BatchReader, batch_producers
from penstock.data.source import as_source, describe_source
from penstock.data.transform import Transform, per_record
from penstock.data.tree import Batch, Record
from penstock.data.worker_processes import Workers

_NO_LIST_OF_ARRAYS = ". A list holds one record an item: arrays with one row a record are given as a tuple or dict"


class Loader:
    """Random access to the batches of a training run: `loader[step]` is always the same batch.

    The batch does not depend on the machine, the process, the number of workers, or the batches that were read before. So the
    position of a run in its data is one integer, and step 10^9 costs as much as step 0.

    Iteration gives the batches from step 0 on. `ps.feed(loader)` reads them in the background, puts them on the devices, and can
    start at any step.

    Args:
      data: a pytree of arrays, files, a table, a data set, a list of records, or a `Source`; see `penstock.data.as_source`.
      batch_size: records in the *global* batch, over all processes.
      shuffle: whether to visit the records in a new order in each epoch, each record once.
      seed: selects the orders and the random numbers of transforms, >= 0.
      epochs: how often to go through the data; None for no end.
      transform: a function from a host batch (NumPy leaves [B, ...]) to a host batch with the same B. If it has a parameter named
        `rng`, it gets a NumPy generator seeded by (seed, step, first row of this process), so its random numbers depend on the
        number of processes. Or `ps.per_record(fn)`, whose random numbers do not.
      collate: a function from a list of records to a batch; `ps.pad_to(lengths)` pads. None stacks.
      remainder: what happens to the last records of an epoch if `batch_size` does not divide their number. "drop" leaves them
        out. "pad" repeats the last record, and adds a boolean leaf `mask` [B] to every batch, which must be a dict. "keep" makes
        a shorter batch.
      workers: None reads on the thread that iterates. Inside of a feed, this is the thread of the feed, or the thread that calls
        `next()` if the batches are tiny and only copies of rows. N reads N batches at once on threads; the source and the
        transform must be safe to call from several threads. "process:N" uses N spawned processes, for Python code that holds the
        interpreter lock.
      process: (index, count) of this process; None asks JAX, which starts its backend. Process p of n reads the rows
        `p·B/n … (p+1)·B/n` of each global batch.

    Raises:
      ValueError, TypeError: at once, if the arguments do not fit each other or the data.

    Example:
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
    ):
        source = as_source(data)
        self.batch_size = at_least(1, "batch_size", batch_size)
        self.epochs = None if epochs is None else at_least(1, "epochs", epochs)
        self.workers = Workers.parse(workers)
        seed = at_least(0, "seed", seed)
        if remainder not in get_args(Remainder):
            raise ValueError(f"remainder={remainder!r}: choose from {', '.join(get_args(Remainder))}")
        self._order = Order(len(source), self.batch_size, bool(shuffle), seed, remainder)
        self.process = (jax.process_index(), jax.process_count()) if process is None else _index_and_count(process)
        if collate is not None and not callable(collate):
            raise TypeError(f"collate={collate!r} is no function from a list of records to a batch")
        wrapped = None if transform is None else Transform(transform, seed)
        self._reader = BatchReader(source, self._order, wrapped, collate, self.process)
        _check(self._reader, self.batch_sizes)
        if self.workers.kind == "process":
            _check_pickles(self._reader)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of global batches in one epoch."""
        return self._order.steps_per_epoch

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Return the different sizes of global batches: `batch_size`, and the size of a shorter last batch that is kept."""
        ends = (0, self.steps_per_epoch - 1) if self._order.remainder == "keep" else ()
        return tuple(dict.fromkeys(self._order.rows(k) for k in ends)) or (self.batch_size,)

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
        return self._reader(step, Clock())

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
        return (
            f"Loader({self._order.records:,} records of {describe_source(self._reader.source)}; "
            f"{self.steps_per_epoch:,} steps of {self.batch_size} an epoch, {epochs})"
        )

    def fingerprint(self) -> dict[str, Any]:
        """Return all that decides which records a step holds. It is compared when the state of a feed is restored.

        The numbers of processes, workers and epochs are not part of it, so they may change.
        """
        order = self._order
        return {
            "source": describe_source(self._reader.source),
            "records": order.records,
            "batch_size": order.batch_size,
            "shuffle": order.shuffle,
            "seed": order.seed,
            "remainder": order.remainder,
        }

    def producers(self, start: int, clocks: Sequence[Clock]) -> Producers:
        """Return the producers of the batches from step `start` on, for a `PrefetchPipeline`: one for each clock."""
        return batch_producers(self._reader, self.workers, start, self._steps, clocks)


def _index_and_count(process: Any) -> tuple[int, int]:
    try:
        index, count = map(operator.index, process)
    except (TypeError, ValueError):
        index, count = 0, 0
    if not 0 <= index < count:
        raise ValueError(f"process={process!r}: needs (index, count) with 0 <= index < count")
    return index, count


def _check(reader: BatchReader, batch_sizes: Sequence[int]) -> None:
    """Raise ValueError if the options do not fit each other or the data."""
    order, count = reader.order, reader.process[1]
    if order.records == 0:
        raise ValueError(f"no records: {type(reader.source).__name__} has length 0")
    if order.steps_per_epoch == 0:
        raise ValueError(
            f"batch_size={order.batch_size} is more than the {order.records:,} records, so remainder='drop' leaves none: "
            "use a smaller batch, or remainder='pad' or 'keep'" + _NO_LIST_OF_ARRAYS * (describe_source(reader.source) == "list")
        )
    if (
        order.remainder == "pad"
        and isinstance(reader.source, ArraySource)
        and reader.transform is None
        and reader.collate is None
    ):
        add_mask(reader.source.arrays, "mask", None, "remainder='pad'")  # every batch would fail
    for rows in batch_sizes:
        if rows % count and rows == order.batch_size:
            raise ValueError(f"batch_size={rows} cannot be divided among {count} processes: use a multiple of {count}")
        if rows % count:
            raise ValueError(
                f"remainder='keep' leaves {rows} of {order.records:,} records for the last batch, which cannot be divided "
                f"among {count} processes: use remainder='drop' or 'pad'"
            )
    if isinstance(reader.collate, pad_to) and reader.collate.has_choice and count > 1:
        raise ValueError(
            f"pad_to with several lengths in {count} processes: each would choose by its own records, and batches of "
            "different shapes hang the first collective; give it one length"
        )


def _check_pickles(reader: BatchReader) -> None:
    """Raise ValueError if a part of the reader cannot be sent to another process."""
    for name in ("source", "transform", "collate"):
        try:
            pickle.dumps(getattr(reader, name), protocol=5, buffer_callback=lambda _: None)
        except Exception as error:
            raise ValueError(
                f"workers='process:N' sends the loader to other processes, but its {name} does not pickle ({error}): define "
                "functions at the top of a module, and open files where they are read"
            ) from error
