"""Penstock's batches as a `DataAdapter` of Keras."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from types import GeneratorType
from typing import Any

import jax
from keras.src import tree
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights, unpack_x_y_sample_weight

from penstock.data.loader import Loader
from penstock.data.tree import Batch, to_numpy
from penstock.feed.feed import Feed
from penstock.feed.stats import Stats
from penstock.feed.upstream import as_upstream
from penstock.keras._replay import Replay, opening, replay_of
from penstock.keras._source import Loaded, Replayed, Source
from penstock.keras._switch import ThreadedEpochs


class PenstockAdapter(DataAdapter):  # type: ignore[misc]  # Keras has no types
    """What `penstock.keras.data` returns: give it to `fit`, `evaluate` or `predict` as `x`, or as `validation_data`.

    Raises:
      TypeError, ValueError: what `penstock.feed` raises for what cannot be fed.
    """

    def __init__(self, batches: Any, unpack: Callable[[Batch], Any] | None):
        if not isinstance(batches, Feed):
            as_upstream(batches)
        self._batches, self._unpack = batches, unpack
        self._class_weight: Mapping[int, float] | None = None
        self._has_steps = False
        # An iterator is read once, whoever begins: what one `fit` read ahead is there for the next.
        self._once = _replay_once(batches) if isinstance(batches, Iterator) else None
        self.epochs = ThreadedEpochs()

    def stats(self) -> list[Stats]:
        """Where the time went: see `ThreadedEpochs.stats`. A Feed has statistics of its own."""
        return self.epochs.stats()

    def configured(
        self, y: Any, sample_weight: Any, batch_size: int | None, steps_per_epoch: int | None, class_weight: Any
    ) -> PenstockAdapter:
        """This data for one `fit`, `evaluate` or `predict`, from what that was called with.

        Raises:
          ValueError: for an argument that belongs into the batches.
        """
        for name, value in (("y", y), ("sample_weight", sample_weight), ("batch_size", batch_size)):
            if value is not None:
                raise ValueError(
                    f"{name} was given beside penstock data, whose batches are complete: leave it out, and make batches "
                    "(x, y) or (x, y, sample_weight), if need be with pk.data(..., unpack=...)"
                )
        one = copy.copy(self)
        one._class_weight, one._has_steps = class_weight, steps_per_epoch is not None
        return one

    @property
    def goes_on(self) -> bool:
        """Whether an epoch begins where the one before it ended, rather than at the start."""
        return isinstance(self._batches, Loader) and self._batches.epochs is None

    @property
    def num_batches(self) -> int | None:
        """In an epoch of Keras; None where that is not known, or for `steps_per_epoch` to say."""
        if isinstance(self._batches, Loader) and self._batches.epochs is None:
            return None if self._has_steps else self._batches.steps_per_epoch
        try:
            return len(self._batches)
        except Exception:  # of their own kinds, where there is no length
            return None

    @property
    def batch_size(self) -> int | None:
        """Records in a batch of this process, where that is known."""
        if isinstance(self._batches, Loader):
            return self._batches.batch_size // self._batches.process[1]
        return None

    @property
    def has_partial_batch(self) -> bool | None:
        return None

    @property
    def partial_batch_size(self) -> int | None:
        return None

    def source(self) -> Source:
        """The batches of an epoch, or, where they go on, of all epochs from now."""
        if isinstance(self._batches, Loader):
            return Loaded(self._batches, self._convert)
        name = type(self._batches).__name__
        if isinstance(self._batches, Feed):
            assert self._once is not None
            return Replayed(name, self._once, direct="always", convert=self._convert)
        if self._once is not None:
            return Replayed(name, self._once, convert=self._convert)
        may_change = _may_change(self._batches)
        return Replayed(name, Replay(opening(self._host_batches), copy=may_change), convert=self._convert)

    def get_jax_iterator(self) -> Iterator[Any]:
        """The batches one by one, made when they are asked for: for Keras to look at the first."""
        source = self.source()
        for number in count():
            try:
                batch = source.take(number)
            except StopIteration:
                return
            yield batch

    def get_numpy_iterator(self) -> Iterator[Any]:
        return self.get_jax_iterator()

    def _host_batches(self) -> Iterable[Batch]:
        return _to_numpy(self._batches)

    def _convert(self, batch: Batch) -> Any:
        """A batch as Keras takes it."""
        if self._unpack is not None:
            batch = self._unpack(batch)
        if self._class_weight is None:
            return batch
        x, y, sample_weight = unpack_x_y_sample_weight(batch)
        if sample_weight is not None:
            raise ValueError("class_weight was given, and the batches have sample weights: leave out one of them")
        if y is None or tree.is_nested(y):
            raise ValueError("class_weight needs batches (x, y) with labels of one output, and these are no such batches")
        return x, y, class_weight_to_sample_weights(y, self._class_weight)


def _replay_once(batches: Iterator[Batch]) -> Replay:
    if isinstance(batches, GeneratorType):
        return replay_of(batches)
    if isinstance(batches, Feed):
        return Replay(lambda: next(batches), copy=False)
    return Replay(opening(lambda: _to_numpy(batches)), copy=True)


def _to_numpy(batches: Any) -> Iterator[Batch]:
    make = getattr(batches, "as_numpy_iterator", None)  # of tf.data
    for batch in make() if make else batches:
        yield jax.tree.map(to_numpy, batch)


def _may_change(batches: Any) -> bool:
    """Whether arrays may be written to after they were given: see `penstock.feed`."""
    return not isinstance(batches, (list, tuple)) and type(batches).__module__.partition(".")[0] != "tensorflow"
