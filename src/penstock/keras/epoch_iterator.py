"""The epoch iterator of Keras, with a thread that reads ahead.

It takes the arguments of Keras's own epoch iterator, and yields the same batches. `fit`, `evaluate` and `predict` of Keras 3.15
and 3.16 use their iterator as follows; the right column is what ours does:

    iterator = JAXEpochIterator(x, y, ...)       replace_iterator.py has replaced this class
    if model is not built: take one batch        outside of the loop: Keras's own code reads, nothing is read ahead
    iterator.reset()                             back to the beginning; each `evaluate` on validation data calls it too
    for each epoch:
        with iterator.catch_stop_iteration():    the loop: a thread runs only inside of it
            for begin, end, batches in iterator: `peek` at the next batch: its error comes before Keras takes the weights away
                train_function(state, batches)   takes `steps_per_execution` batches

In 3.15, the train function takes them one after the other. In 3.16, it takes them at once, stacked (see batch_iterator.py), and
models that are not built take a batch from the data adapter. versions.py lists the differences.

*When threads end.* `catch_stop_iteration` is left however the loop ends: at the end of the data, by `stop_training`, by an
exception in a callback, in the data or in the step, or by Ctrl-C. Leaving it pauses the batches, which ends the thread and waits
for it. Batches that were read ahead stay with the source for the next epoch. Worker processes are kept until `fit` has ended and
its frame drops the iterator.

*How far it reads.* Keras calls the hooks of a `PyDataset` between epochs, so nothing is read beyond the end of the epoch there.
Other data has no hooks. If its iterator continues in the next epoch, as a generator's does with `steps_per_epoch`, the batches
that were read ahead are used there.

*A loop inside of the loop*, such as `evaluate` in a callback, may use the same data. So the thread of the outer loop ends before
the inner loop reads anything, and a new one starts after it.

*A saved run* continues in the middle of an epoch. Keras's own count of the epoch goes past the executions that were trained,
and the batches begin after them. A `Saver` (session.py) is called between two executions, when the first batch of the next one
has come.

*A Python generator* may be used again after `fit`. Its batches that were read and not consumed are kept as long as it lives, for
the next call that gets it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import types
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from keras.src import tree
from keras.src.backend.jax.trainer import JAXEpochIterator
from keras.src.distribution import distribution_lib
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import get_jax_iterator
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from penstock.data.loader import Loader
from penstock.data.steps import Steps
from penstock.data.streams.stream import Stream
from penstock.feed.adapters import adapt
from penstock.feed.device_feed import Feed
from penstock.feed.stats import Caller, LaterStats
from penstock.keras.batch_iterator import BatchIterator
from penstock.keras.batches import Replay, ResumableBatches, ResumableIterator, UnthreadedBatches, copied, opening, replay_of
from penstock.keras.data_adapter import PenstockDataAdapter
from penstock.keras.session import Position, Run, Session, expected

_KINDS = {  # of the adapters of Keras, for the advice of a verdict
    "ArrayDataAdapter": "arrays",
    "PyDatasetAdapter": "PyDataset",
    "TFDatasetAdapter": "tensorflow",
    "TorchDataLoaderAdapter": "torch",
    "GrainDatasetAdapter": "grain",
}


class _Loops(threading.local):
    """The loops over batches on this thread, the innermost last."""

    def __init__(self) -> None:
        self.running: list[ThreadedEpochIterator] = []


_loops = _Loops()


class ThreadedEpochIterator(JAXEpochIterator):  # type: ignore[misc]  # Keras has no types
    """The replacement for Keras's own epoch iterator, with the same arguments. The docstring of this module explains it."""

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        batch_size: int | None = None,
        steps_per_epoch: int | None = None,
        shuffle: bool | str = False,
        class_weight: Any = None,
        steps_per_execution: int = 1,
    ):
        epochs = Session.epochs
        if isinstance(x, (Loader, Steps, Stream, Feed)):  # Keras knows none of them
            x = PenstockDataAdapter(x, None)
        else:
            _check(x)
        self._threaded = epochs is not None or isinstance(x, PenstockDataAdapter)
        self._looping = False
        self._batches: BatchIterator | None = None
        self._had_batch = False
        self._name = type(x).__name__
        self._generator: Replay | None = None
        self._in_memory = not any(map(_is_in_a_file, tree.flatten((x, y, sample_weight))))
        records = [] if epochs is None else [epochs]
        for other in _loops.running:
            other.stop_for_inner_loop()
        if isinstance(x, PenstockDataAdapter):
            x = x.for_run(y, sample_weight, class_weight)
            self._name = x.name
            records.append(x.epochs)
        elif self._threaded and isinstance(x, types.GeneratorType):
            self._kept_alive = x  # there may be no other reference to it
            self._generator = replay_of(x)
            x = _pop_all(self._generator)
        super().__init__(x, y, sample_weight, batch_size, steps_per_epoch, shuffle, class_weight, steps_per_execution)
        if isinstance(x, PenstockDataAdapter):
            x.has_steps = self.steps_per_epoch is not None
            x.check_steps()
            self._num_batches = x.num_batches
        if self._generator is not None:
            _resume(self.data_adapter, self._generator)
        self._trained = 0  # number of batches that Keras took from iterators that are closed
        self._saver = expected()
        self._start = self._saver.attach(self) if self._saver is not None else None
        # Nothing below passes a reference to this iterator to others, so that it is freed, and its last threads end, with `fit`.
        self._runs = [record.begin() for record in records]

    def reset(self) -> None:
        """Go back to the beginning of the data."""
        self._close()
        super().reset()

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """Run the loop over the batches of an epoch inside of this context, and end its threads however it ends."""
        if not self._threaded:
            with super().catch_stop_iteration():
                yield
            return
        self._looping = True
        _loops.running.append(self)
        try:
            with super().catch_stop_iteration():
                yield
            self._raise_failure()
        except BaseException as error:
            if self._batches is None or self._batches.in_first_execution:
                self.explain(error)
            self._close()
            raise
        finally:
            _loops.running.remove(self)
            self._looping = False
            # After a loop that was left early, this generator is suspended. It and this iterator would refer to each other.
            self._epoch_iterator: Any = None
            if self._batches is not None:
                self._batches.pause()

    def explain(self, error: BaseException) -> None:
        """Add a note to an error of Keras if data made by `penstock.keras.data` may be its cause."""
        if isinstance(self.data_adapter, PenstockDataAdapter):
            self.data_adapter.explain(error)

    def stop_for_inner_loop(self) -> None:
        """End the thread because a callback begins another run inside of this loop. It may use the same data."""
        if self._batches is not None:
            self._batches.stop_for_inner_loop()

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the executions of an epoch. In the loop, it returns each after its first batch has come."""
        if not self._looping:
            return super().__iter__()
        self._epoch_iterator = self._executions()
        return self._epoch_iterator

    def _executions(self) -> Iterator[Any]:
        for step in self._enumerate_iterator():
            batches, saver = self._batches, self._saver
            assert batches is not None
            if saver is None:
                found = batches.peek()
            else:
                position = self.position(step[0])
                with saver.awaiting(position):
                    found = batches.peek()
                if found:
                    saver.before_execution(position)
            if not found and not self._had_batch:
                raise _no_batch_error(self._name)
            self._had_batch = True
            yield step
            if batches.failure is not None:
                self._raise_failure()

    @property
    def trained(self) -> int:
        """Return the number of batches that Keras has taken in its loops."""
        return self._trained + (self._batches.taken if self._batches is not None else 0)

    def position(self, step: int | None) -> Position:
        """Return the position before an execution.

        Args:
          step: number of the first batch of the execution in its epoch; None for the position between two epochs.
        """
        adapter, batches = self.data_adapter, self._batches
        consumed, seen = 0, 0
        if step is not None:
            assert batches is not None
            consumed, seen = batches.consumed, self._steps_seen - self.steps_per_execution
        elif batches is not None and (adapter.is_endless or (self.steps_per_epoch and self._current_iterator is not None)):
            consumed, seen = batches.consumed, self._steps_seen
        return Position(step or 0, seen, consumed, self._num_batches, adapter.state(consumed))

    def interrupt(self) -> None:
        """Let this iterator raise RuntimeError if it waits for a batch in another thread."""
        if (batches := self._batches) is not None:
            batches.interrupt()

    def _enumerate_iterator(self) -> Iterator[Any]:
        executions = super()._enumerate_iterator()
        if self._start is None or not self._looping:
            return executions
        return self._continued(executions, self._start)

    def _continued(self, executions: Iterator[Any], start: Position) -> Iterator[Any]:
        """Yield the executions of an epoch that were not trained before, in the form of Keras."""
        if self._num_batches is None:
            self._num_batches = start.length
        for begin, end, batches in executions:
            self._start = None
            if begin == start.step:
                self._steps_seen = start.seen + self.steps_per_execution
            if begin >= start.step:
                yield begin, end, batches

    def _raise_failure(self) -> None:
        """Raise the error that ended the last execution before its last step."""
        if self._batches is not None and self._batches.failure is not None:
            failure, self._batches.failure = self._batches.failure, None
            try:
                raise failure
            finally:
                del failure  # otherwise its traceback and this frame would refer to each other

    def _get_iterator(self) -> Any:
        if not self._looping:
            iterator = super()._get_iterator()
            return _require_a_batch(iterator, self._name) if self._threaded else iterator
        if self._batches is not None and isinstance(self.data_adapter, PenstockDataAdapter) and self.data_adapter.is_endless:
            return self._batches
        self._close()
        add_stats = partial(_add_stats, self._runs)
        epoch_batches = self.data_adapter.epoch_batches if isinstance(self.data_adapter, PenstockDataAdapter) else None
        first = self._start.consumed if self._start is not None else 0
        batches, steps = self._resumable(first), self.steps_per_execution
        self._batches = BatchIterator(batches, add_stats, self._caller(), self._read_limit(), steps, epoch_batches, first)
        return self._batches

    def _resumable(self, first: int) -> ResumableBatches:
        """Return the batches that are read in the loop, by the kind of the data."""
        adapter = self.data_adapter
        if isinstance(adapter, PenstockDataAdapter):
            return adapter.resumable(first)
        if self._generator is not None:
            return ResumableIterator(self._name, self._generator, peeked=adapter._first_batches, convert=_to_jax_batch)
        on_cpu = jax.default_backend() == "cpu" and distribution_lib.distribution() is None
        if isinstance(adapter, ArrayDataAdapter) and self._in_memory and on_cpu:
            # Placing a batch takes almost no time here. It takes longer to receive one from a thread than to make it.
            return UnthreadedBatches(self._name, adapter.get_jax_iterator())
        # Batches of arrays are new arrays, or views of arrays that nobody writes to during training. TensorFlow's are read-only.
        copy = not isinstance(adapter, (ArrayDataAdapter, TFDatasetAdapter))
        return ResumableIterator(self._name, Replay(opening(adapter.get_jax_iterator), copy))

    def _caller(self) -> Caller:
        """Return the description of the data for the advice of a verdict."""
        if isinstance(self.data_adapter, PenstockDataAdapter):
            return self.data_adapter.caller
        return Caller("threaded epochs", _KINDS.get(type(self.data_adapter).__name__, "iterable"))

    def _read_limit(self) -> int | None:
        """Return the number of batches to the end of an epoch, if Keras then calls hooks that may change the data; else None."""
        steps = self.steps_per_epoch or self._num_batches
        kind = type(self.data_adapter)
        hooks = (kind.on_epoch_begin, kind.on_epoch_end) != (DataAdapter.on_epoch_begin, DataAdapter.on_epoch_end)
        return math.ceil(steps / self.steps_per_execution) * self.steps_per_execution if hooks and steps else None

    def _close(self) -> None:
        batches, self._batches = self._batches, None
        if batches is not None:
            self._trained += batches.taken
            batches.close()

    def __del__(self) -> None:
        # A pause keeps worker processes, so they end here. Any thread may run this. It waits for the workers for half a second at
        # most, and cannot deadlock: the workers take no lock that this thread may hold.
        if getattr(self, "_batches", None) is not None:
            self._close()


def _check(x: Any) -> None:
    """Raise TypeError for data for which Keras has no error that helps."""
    if isinstance(x, type):
        raise TypeError(
            f"the data is the class {x.__name__}, and an object is needed: arrays, or pk.data(...) of a Loader or an iterable; "
            "as validation_data, (x, y) or pk.data(...)"
        )
    if type(x).__module__.startswith("penstock.data."):
        adapt(x, "pk.data")  # a mixture or another source of records: it raises TypeError, which says what to give


def _require_a_batch(batches: Iterable[Any], name: str) -> Iterator[Any]:
    """Yield the batches with which Keras builds a model, and raise ValueError if there is none."""
    batch = None
    for batch in batches:
        yield batch
    if batch is None:
        raise _no_batch_error(name)


def _no_batch_error(name: str) -> ValueError:
    return ValueError(
        f"{name} has no batch 0: it yielded nothing, and at least one batch is needed. Was it used up before, or does it drop a "
        "last batch that is too small?"
    )


def _add_stats(runs: Sequence[Run], stats: LaterStats) -> None:
    """Add the statistics of a feed to its runs."""
    for run in runs:
        run.add(stats)


def _to_jax_batch(batch: Any) -> Any:
    """Convert a batch of a generator as Keras's adapter does."""
    return next(get_jax_iterator((batch,)))


def _pop_all(replay: Replay) -> Iterator[Any]:
    """Yield the batches of a generator for Keras's adapter, which takes the first ones at once. They are not copied."""
    while True:
        try:
            batch = replay.pop()
        except StopIteration:
            return
        yield batch


def _resume(adapter: Any, replay: Replay) -> None:
    """Let the adapter of a generator continue with the batches that were read ahead, each time that Keras begins again.

    Keras always begins with the first batches, which the adapter took at once, and continues with the rest.
    """
    peeked = adapter._first_batches
    adapter.generator = lambda: itertools.chain(map(copied, peeked), replay)


def _is_in_a_file(array: Any) -> bool:
    """Return whether an array is a memory-mapped file, or a view of one, so that reading it may wait for a disk."""
    while array is not None and not isinstance(array, np.memmap):
        array = getattr(array, "base", None)
    return array is not None
