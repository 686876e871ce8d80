"""Penstock's batches as a `DataAdapter` of Keras."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

from keras.src import tree
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights, unpack_x_y_sample_weight

from penstock._feed.adapters import adapt, iterate, length_of, mark_as_used, may_change
from penstock._feed.device_feed import Feed
from penstock._feed.stats import Stats
from penstock.data.loader import Loader
from penstock.data.tree import Batch, to_numpy
from penstock.keras._aligned import copied
from penstock.keras._replay import Replay, is_replayed, opening, replay_of
from penstock.keras._resumable import Loaded, Read, Source
from penstock.keras._session import ThreadedEpochs
from penstock.keras._versions import super_batches


class PenstockDataAdapter(DataAdapter):  # type: ignore[misc]  # Keras has no types
    """What `penstock.keras.data` returns: give it to `fit`, `evaluate` or `predict` as `x`, or as `validation_data`.

    Raises:
      TypeError, ValueError: what `penstock.feed` raises for what cannot be fed.
    """

    def __init__(self, batches: Any, unpack: Callable[[Batch], Any] | None):
        self._batches, self._unpack = batches, unpack
        self._once = _replay_once(batches) if isinstance(batches, Iterator) else None
        if self._once is None:
            adapt(batches)
        self._class_weight: Mapping[int, float] | None = None
        self.has_steps = False  # an epoch of Keras is so many steps, and not one of the data's
        self.epochs = ThreadedEpochs()

    def stats(self) -> list[Stats]:
        """Where the time went: see `ThreadedEpochs.stats`. A Feed has statistics of its own."""
        return self.epochs.stats()

    def configured(self, y: Any, sample_weight: Any, class_weight: Any) -> PenstockDataAdapter:
        """This data for one `fit`, `evaluate` or `predict`, from what that was called with.

        Raises:
          ValueError: for an argument that belongs into the batches.
        """
        for name, value in (("y", y), ("sample_weight", sample_weight)):
            if value is not None:
                raise ValueError(
                    f"{name} was given beside penstock data, whose batches are complete: leave it out, and make batches "
                    "(x, y) or (x, y, sample_weight), if need be with pk.data(..., unpack=...)"
                )
        one = copy.copy(self)
        one._class_weight = class_weight
        return one

    @property
    def name(self) -> str:
        """What errors call it."""
        return Loaded.name if isinstance(self._batches, Loader) else type(self._batches).__name__

    @property
    def goes_on(self) -> bool:
        """Whether an epoch begins where the one before it ended, rather than at the start."""
        return isinstance(self._batches, Loader) and self._batches.epochs is None

    @property
    def whole(self) -> int | None:
        """Batches after which an execution ends, where the data itself does not."""
        return self.num_batches if self.goes_on else None

    @property
    def num_batches(self) -> int | None:
        """In an epoch of Keras; None where that is not known, or for `steps_per_epoch` to say."""
        if self.goes_on:
            return None if self.has_steps else self._batches.steps_per_epoch
        return length_of(self._batches)

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
        convert = self._convert if self._unpack or self._class_weight is not None else None
        if isinstance(self._batches, Loader):
            return Loaded(self._batches, convert)
        if isinstance(self._batches, Feed):
            assert self._once is not None
            return Read(self.name, self._once, direct=True, convert=convert)
        if self._once is not None:
            return Read(self.name, self._once, convert=self._convert_kept)
        return Read(self.name, Replay(opening(self.get_jax_iterator), copy=may_change(self._batches)))

    def get_jax_iterator(self, super_batch: int | None = None) -> Iterator[Any]:
        """The batches one by one, made when they are asked for: also for Keras to look at the first.

        Args:
          super_batch: so many at a time, as versions of Keras take them that stack.
        """
        batches = self._one_by_one()
        return batches if super_batch is None else super_batches(batches, super_batch)

    def _one_by_one(self) -> Iterator[Any]:
        if self._once is not None:
            return map(self._convert_kept, self._once)
        if isinstance(self._batches, Loader):
            steps = count() if self._batches.epochs is None else range(len(self._batches))
            return (self._convert(self._batches[step]) for step in steps)
        return map(self._convert, map(_numpy_tree, iterate(self._batches)))

    def get_numpy_iterator(self) -> Iterator[Any]:
        return self.get_jax_iterator()

    def _convert_kept(self, batch: Batch) -> Any:
        """The same of one that others may read too, so that `unpack` has arrays of its own."""
        batch = _numpy_tree(batch)
        return self._convert(copied(batch) if self._unpack else batch)

    def _convert(self, batch: Batch) -> Any:
        """A batch as Keras takes it."""
        if self._unpack is not None:
            try:
                batch = self._unpack(batch)
            except StopIteration as error:  # which would end the epoch in silence
                raise RuntimeError("unpack raised StopIteration") from error
        if self._class_weight is None:
            return batch
        x, y, sample_weight = unpack_x_y_sample_weight(batch)
        if sample_weight is not None:
            raise ValueError("class_weight was given, and the batches have sample weights: leave out one of them")
        if y is None or tree.is_nested(y):
            raise ValueError("class_weight needs batches (x, y) with labels of one output, and these are no such batches")
        return x, y, class_weight_to_sample_weights(y, self._class_weight)


def _replay_once(batches: Iterator[Batch]) -> Replay:
    """An iterator is read once, whoever begins: what one `fit` read ahead is there for the next.

    Raises:
      ValueError: one that was fed before, and of which nobody knows what was read ahead.
    """
    if isinstance(batches, Feed):
        return replay_of(batches, copy=False)
    if not is_replayed(batches):
        adapt(batches)
        mark_as_used(batches)
    try:
        return replay_of(batches)
    except TypeError:  # there are no weak references of it, as of a map
        return Replay(opening(lambda: batches), copy=True)


def _numpy_tree(batch: Batch) -> Batch:
    return tree.map_structure(to_numpy, batch, none_is_leaf=False)
