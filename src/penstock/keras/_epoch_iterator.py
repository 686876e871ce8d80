"""Keras's epoch iterator, with a thread that reads ahead.

`fit`, `evaluate` and `predict` of Keras 3.15 and 3.16 use their iterator as follows; at the right, where this one comes in:

    iterator = JAXEpochIterator(x, y, ...)       the seam
    if model is not built: take one batch        outside of the loop: read by Keras's own code, nothing ahead
    iterator.reset()                             back to the beginning; so does each `evaluate` on validation data
    for each epoch:
        with iterator.catch_stop_iteration():    the loop: only in here is there a thread
            for begin, end, batches in iterator: `look` at the next batch: an error comes before weights are taken away
                train_function(state, batches)   takes `steps_per_execution` batches

In 3.15 the train function takes them one after the other. In 3.16 it takes them at once, stacked (see `_execution`), and a model
that is not built takes its batch from the data adapter, past this iterator. `_versions` lists what differs.

*When threads end.* `catch_stop_iteration` is left whichever way the loop ends: exhausted, by `stop_training`, by an exception
in a callback, in the data or in the step, by Ctrl-C. It pauses the batches, which ends the thread and waits for it; what was read
ahead stays with the source for the next epoch. (Workers that are processes are kept until `fit` is done, whose frame then
drops the iterator.)

*How far it reads.* Keras calls the hooks of a `PyDataset` between epochs, so nothing is read beyond the epoch there. Other data
has no hooks; where its iterator lives on, as a generator's does with `steps_per_epoch`, so does what was read ahead of it.

*A loop within the loop*, such as `evaluate` in a callback, may be over the same data, so the outer one gives way: its thread ends
before the inner one looks at anything, and starts again after it.

*A Python generator* outlives even `fit`. What was read of it and not had is kept as long as the generator lives, for the next
one that is given it.
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

from keras.src.backend.jax.trainer import JAXEpochIterator
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import get_jax_iterator
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from penstock._feed.stats import Stats
from penstock.keras._aligned import copied
from penstock.keras._batch_iterator import Batches
from penstock.keras._data_adapter import PenstockDataAdapter
from penstock.keras._replay import Replay, opening, replay_of
from penstock.keras._resumable import Read, Source
from penstock.keras._session import Session


class _Loops(threading.local):
    """The loops over batches that this thread is in, one inside of the other."""

    def __init__(self) -> None:
        self.running: list[ThreadedEpochIterator] = []


_loops = _Loops()


class ThreadedEpochIterator(JAXEpochIterator):  # type: ignore[misc]  # Keras has no types
    """See the text of this module. Takes what Keras's own takes."""

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
        self._threaded = epochs is not None or isinstance(x, PenstockDataAdapter)
        self._looping = False
        self._batches: Batches | None = None
        self._any = False  # whether there was a batch
        self._name = type(x).__name__
        self._generator: Replay | None = None
        records = [] if epochs is None else [epochs]
        for other in _loops.running:
            other.give_way()
        if isinstance(x, PenstockDataAdapter):
            x = x.configured(y, sample_weight, class_weight)
            self._name = x.name
            records.append(x.epochs)
        elif self._threaded and isinstance(x, types.GeneratorType):
            self._kept_alive = x  # nobody else may have it
            self._generator = replay_of(x)
            x = _peeked(self._generator)
        super().__init__(x, y, sample_weight, batch_size, steps_per_epoch, shuffle, class_weight, steps_per_execution)
        if isinstance(x, PenstockDataAdapter):
            x.has_steps = self.steps_per_epoch is not None
            self._num_batches = x.num_batches
        if self._generator is not None:
            _resume(self.data_adapter, self._generator)
        # Nothing that is given to others below refers to this iterator, which ends the last of its threads when it is dropped.
        self._runs = [record.begin() for record in records]

    def reset(self) -> None:
        self._close()
        super().reset()

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
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
        except BaseException:
            self._close()
            raise
        finally:
            _loops.running.remove(self)
            self._looping = False
            # A loop that was left early leaves this generator in the middle: it and we would hold each other.
            self._epoch_iterator: Any = None
            if self._batches is not None:
                self._batches.pause()

    def give_way(self) -> None:
        """Another run begins inside of this loop, in a callback, perhaps over the same data."""
        if self._batches is not None:
            self._batches.give_way()

    def __next__(self) -> Any:
        if not self._looping:
            return super().__next__()
        self._raise_failure()
        step = next(self._epoch_iterator)
        assert self._batches is not None
        if self._batches.look():
            self._any = True
        elif not self._any:
            raise _nothing(self._name)
        return step

    def _raise_failure(self) -> None:
        """What ended the last execution before it had all of its steps."""
        if self._batches is not None and self._batches.failure is not None:
            failure, self._batches.failure = self._batches.failure, None
            try:
                raise failure
            finally:
                del failure  # or its traceback would hold this frame, and this frame it

    def _get_iterator(self) -> Any:
        if not self._looping:
            iterator = super()._get_iterator()
            return _not_empty(iterator, self._name) if self._threaded else iterator
        if self._batches is not None and isinstance(self.data_adapter, PenstockDataAdapter) and self.data_adapter.goes_on:
            return self._batches
        self._close()
        note = partial(_note, self._runs)
        whole = self.data_adapter.whole if isinstance(self.data_adapter, PenstockDataAdapter) else None
        self._batches = Batches(self._source(), note, self._limit(), self.steps_per_execution, whole)
        return self._batches

    def _source(self) -> Source:
        adapter = self.data_adapter
        if isinstance(adapter, PenstockDataAdapter):
            return adapter.source()
        if self._generator is not None:
            return Read(self._name, self._generator, peeked=adapter._first_batches, convert=_as_jax_takes_it)
        if isinstance(adapter, ArrayDataAdapter) and _on_host():
            batches = adapter.get_jax_iterator()
            return Read(self._name, Replay(lambda: next(batches), copy=False), quick=batches)
        # Of arrays Keras makes new ones, or views of what is not written to while it trains; TensorFlow's are read-only.
        copy = not isinstance(adapter, (ArrayDataAdapter, TFDatasetAdapter))
        return Read(self._name, Replay(opening(adapter.get_jax_iterator), copy))

    def _limit(self) -> int | None:
        """Batches until the end of an epoch, if Keras then calls hooks that may change what comes next."""
        steps = self.steps_per_epoch or self._num_batches
        kind = type(self.data_adapter)
        hooks = (kind.on_epoch_begin, kind.on_epoch_end) != (DataAdapter.on_epoch_begin, DataAdapter.on_epoch_end)
        return math.ceil(steps / self.steps_per_execution) * self.steps_per_execution if hooks and steps else None

    def _close(self) -> None:
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close()

    def __del__(self) -> None:
        # Of interest where workers are processes, which a pause leaves alone; of use to nobody else by now. Whatever thread
        # comes by here waits for others only, for half a second at most, and those need nothing that it may hold.
        if getattr(self, "_batches", None) is not None:
            self._close()


def _not_empty(batches: Iterable[Any], name: str) -> Iterator[Any]:
    """For Keras to look at, and build the model."""
    batch = None
    for batch in batches:
        yield batch
    if batch is None:
        raise _nothing(name)


def _nothing(name: str) -> ValueError:
    return ValueError(
        f"{name} has no batch 0: it yielded nothing, and at least one batch is needed. Was it used up before, or does it drop a "
        "last batch that is too small?"
    )


def _note(runs: Sequence[list[Stats]], stats: Stats) -> None:
    for run in runs:
        run[:] = [run[0] + stats] if run else [stats]


def _as_jax_takes_it(batch: Any) -> Any:
    """A generator's batch, as its adapter converts it."""
    return next(get_jax_iterator((batch,)))


def _peeked(replay: Replay) -> Iterator[Any]:
    """For the adapter to look at. As they are: of a buffer that is filled again and again it sees what it always sees."""
    while True:
        try:
            batch = replay.pop()
        except StopIteration:
            return
        yield batch


def _resume(adapter: Any, replay: Replay) -> None:
    """Let the adapter go on with what was read of its generator, each time that Keras begins anew.

    Keras begins with the batches that the adapter looked at, every time, and goes on with the rest.
    """
    peeked = adapter._first_batches
    adapter.generator = lambda: itertools.chain(map(copied, peeked), replay)


def _on_host() -> bool:
    """Whether Keras would hand host arrays to its functions."""
    import jax
    from keras.src.distribution import distribution_lib

    return jax.default_backend() == "cpu" and distribution_lib.distribution() is None
