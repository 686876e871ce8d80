"""The `DataAdapter` of Keras for batches of penstock: it takes whatever `penstock.feed` takes.

It is not a `BatchAdapter`, the form in which a `Feed` takes batches. It makes `ResumableBatches`, and these make one.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import Any

from keras.src import tree
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights, unpack_x_y_sample_weight

from penstock.data.loader import Loader
from penstock.data.steps import Steps
from penstock.data.streams.stream import Stream
from penstock.data.tree import Batch, is_whole, to_arrays, to_numpy
from penstock.feed.adapters import adapt, iterate, length_of, mark_as_used, may_change
from penstock.feed.device_feed import STATE_VERSION, Feed
from penstock.feed.stats import Caller, Stats, caller_of
from penstock.keras.batches import (
    Replay,
    ResumableBatches,
    ResumableIterator,
    ResumableLoader,
    copied,
    is_replayed,
    opening,
    replay_of,
)
from penstock.keras.session import ThreadedEpochs
from penstock.keras.versions import super_batches

_LABELS = ("label", "labels", "y", "target", "targets")


class PenstockDataAdapter(DataAdapter):  # type: ignore[misc]  # Keras has no types
    """The result of `penstock.keras.data`, for `fit`, `evaluate` or `predict` as `x`, or as `validation_data`.

    Args:
      batches, unpack: see `data`.

    Attributes:
      batches: whatever the data was made of.
      has_steps: whether an epoch of Keras is a number of steps, rather than an epoch of the data.
      epochs: the statistics.

    Raises:
      TypeError, ValueError: `batches` cannot be fed, as for `penstock.feed`.
    """

    has_partial_batch: bool | None = None  # unknown, as is the size of the last batch
    partial_batch_size: int | None = None

    def __init__(self, batches: Any, unpack: Callable[[Batch], Any] | None):
        self.batches, self._unpack = batches, unpack
        self._replay = _replay_once(batches) if isinstance(batches, Iterator) else None
        if self._replay is None:
            adapt(batches, "pk.data")
        self._class_weight: Mapping[int, float] | None = None
        self._x_alone = ""  # advice on labels, if Keras takes the batches as x alone
        self.has_steps = self._warned = False
        self.epochs = ThreadedEpochs()

    def stats(self) -> list[Stats]:
        """Return where the time was spent, see `ThreadedEpochs.stats`. A `Feed` has statistics of its own."""
        return self.epochs.stats()

    def for_run(self, y: Any, sample_weight: Any, class_weight: Any) -> PenstockDataAdapter:
        """Return this data for one `fit`, `evaluate` or `predict`, with the arguments of that call.

        Raises:
          ValueError: an argument was given that is a part of the batches.
        """
        for name, value in (("y", y), ("sample_weight", sample_weight)):
            if value is not None:
                raise ValueError(
                    f"{name} was given beside penstock data, whose batches are complete: leave it out, and make batches "
                    "(x, y) or (x, y, sample_weight), if need be with pk.data(..., unpack=...)"
                )
        data = copy.copy(self)
        data._class_weight = class_weight
        return data

    @property
    def name(self) -> str:
        """Return the name in errors."""
        name = type(self.batches).__name__
        return f"the {name}" if isinstance(self.batches, (Loader, Steps, Stream)) else name

    @property
    def caller(self) -> Caller:
        """Return the description of this data for the advice of a verdict."""
        caller = caller_of(self.batches, "pk.data")
        return replace(caller, kind="Feed") if isinstance(self.batches, Feed) else caller

    @property
    def is_endless(self) -> bool:
        """Return whether the data is a Loader or Steps without end, which continue from epoch to epoch."""
        if isinstance(self.batches, Steps):
            return self.batches.length is None
        return isinstance(self.batches, Loader) and self.batches.epochs is None

    def explain(self, error: BaseException) -> None:
        """Add a note to an error of Keras if its cause may be that batches without labels reached it."""
        noted = any(note.startswith("penstock") for note in getattr(error, "__notes__", ()))
        if self._x_alone and isinstance(error, (ValueError, TypeError, KeyError, AttributeError, RuntimeError)) and not noted:
            error.add_note(f"penstock: Keras took each batch as x alone, without labels. {self._x_alone}")

    def check_steps(self) -> None:
        """Raise ValueError if an epoch of Keras would never end."""
        is_steps = isinstance(self.batches, Steps)
        goes_on = self.is_endless if is_steps else isinstance(self.batches, Stream) and self.batches.epochs is None
        if goes_on and not self.has_steps:
            end = "length=..." if is_steps else "epochs=1"
            raise ValueError(
                f"an epoch of Keras over {self.name} would never end: give fit(..., steps_per_epoch=...), validation_steps=... "
                f"for validation data, or steps=... in evaluate and predict; or give {self.name} an end with {end}"
            )

    @property
    def epoch_batches(self) -> int | None:
        """Return the number of batches after which an execution must end, because the data does not; None if the data ends."""
        return self.num_batches if self.is_endless else None

    @property
    def num_batches(self) -> int | None:
        """Return the number of batches in an epoch of Keras; None if it is unknown, or given by `steps_per_epoch`."""
        if self.is_endless:
            return None if self.has_steps or isinstance(self.batches, Steps) else self.batches.steps_per_epoch
        return length_of(self.batches)

    @property
    def batch_size(self) -> int | None:
        """Return the number of records in a batch of this process; None if it is unknown."""
        if isinstance(self.batches, Loader):
            return self.batches.batch_size // self.batches.process[1]
        return None

    def state(self, consumed: int) -> Any:
        """Return the position of a run in its data, in the form of `Feed.state`.

        Args:
          consumed: number of batches that Keras has taken of a Loader or of `Steps` since they began. A Feed counts them itself.

        Raises:
          TypeError: the data has no state.
        """
        if isinstance(self.batches, Feed):
            assert self._replay is not None
            state = self._replay.state()
            if isinstance(state, TypeError):
                raise state
            return state
        return {"version": STATE_VERSION, "step": consumed, "of": self._fingerprint}

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        return adapt(self.batches).fingerprint()

    def resumable(self, first: int = 0) -> ResumableBatches:
        """Return the batches of one epoch, or of all epochs from now on if the data continues from epoch to epoch.

        Batches of a Loader or of `Steps` begin at the number `first`.
        """
        if isinstance(self.batches, (Loader, Steps)):
            return ResumableLoader(self.batches, self._convert, first)
        if isinstance(self.batches, Feed):
            assert self._replay is not None
            return ResumableIterator(self.name, self._replay, prefetched=self.batches, convert=self._convert)
        if self._replay is not None:
            return ResumableIterator(self.name, self._replay, convert=self._convert_copy)
        return ResumableIterator(self.name, Replay(opening(self.get_jax_iterator), copy=may_change(self.batches)))

    def get_jax_iterator(self, super_batch: int | None = None) -> Iterator[Any]:
        """Return an iterator that reads batches on the calling thread. Keras uses it to inspect the first batch.

        Versions of Keras that stack give `super_batch`, the number of batches in an item; None for single batches.
        """
        batches = self._iterate()
        return batches if super_batch is None else super_batches(batches, super_batch)

    get_numpy_iterator = get_jax_iterator

    def _iterate(self) -> Iterator[Any]:
        if self._replay is not None:
            return map(self._convert_copy, self._replay)
        if isinstance(self.batches, Loader):
            steps = count() if self.batches.epochs is None else range(len(self.batches))
            return (self._convert(self.batches[step]) for step in steps)
        return map(self._convert, map(_numpy_tree, iterate(self.batches)))

    def _convert_copy(self, batch: Batch) -> Any:
        """Convert a batch that may be read again. `unpack` gets a copy, because it may write to the arrays."""
        batch = _numpy_tree(batch)
        return self._convert(copied(batch) if self._unpack else batch)

    def _convert(self, batch: Batch) -> Any:
        """Convert a batch to the form that Keras takes."""
        if self._unpack is not None:
            try:
                batch = self._unpack(batch)
            except StopIteration as error:  # would end the epoch without a message
                raise RuntimeError("unpack raised StopIteration") from error
        else:
            self._x_alone = _advice_for_x_alone(batch)
            if isinstance(batch, Mapping):
                self._warn_of_labels(batch)
        if self._class_weight is None:
            return batch
        x, y, sample_weight = unpack_x_y_sample_weight(batch)
        if sample_weight is not None:
            raise ValueError("class_weight was given, and the batches have sample weights: leave out one of them")
        if y is None or tree.is_nested(y):
            raise ValueError("class_weight needs batches (x, y) with labels of one output, and these have none, or several")
        return x, y, class_weight_to_sample_weights(y, self._class_weight)

    def _warn_of_labels(self, batch: Mapping[Any, Any]) -> None:
        """Warn once if a dict batch, which Keras takes as x alone, has a leaf that is named like labels."""
        labels = [name for name in batch if str(name).lower() in _LABELS]
        if not labels or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"a batch is a dict of {list(batch)}, and Keras takes a dict as x alone, so {labels[0]!r} is not a label for it: "
            f"give {_unpack_for(batch)}, or batches (x, y)",
            stacklevel=2,
        )


def _advice_for_x_alone(batch: Batch) -> str:
    """Return how to give labels, for a batch that Keras takes as x alone; "" for another batch."""
    if isinstance(batch, Mapping) and len(batch) > 1:
        return f"If one of {', '.join(map(repr, batch))} holds the labels, give {_unpack_for(batch)}"
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return ""
    return "If the model needs labels, give batches (x, y), if need be with pk.data(..., unpack=...)"


def _unpack_for(batch: Mapping[Any, Any]) -> str:
    """Return the call that takes a dict of inputs and labels apart, as far as their names tell which is which."""
    labels = [name for name in batch if str(name).lower() in _LABELS]
    if not labels:
        return "pk.data(..., unpack=lambda batch: (batch[<name of the inputs>], batch[<name of the labels>]))"
    others = [name for name in batch if name not in labels] or ["x"]
    return f"pk.data(..., unpack=lambda batch: (batch[{others[0]!r}], batch[{labels[0]!r}]))"


def _replay_once(batches: Iterator[Batch]) -> Replay:
    """Return the Replay of an iterator, so that the next `fit` gets the batches that one has read ahead.

    Raises:
      ValueError: the iterator was fed before, and the batches that were read ahead are lost.
    """
    if isinstance(batches, Feed):
        return replay_of(batches, copy=False, state=_state)
    if not is_replayed(batches):
        adapt(batches, "pk.data")
        mark_as_used(batches)
    try:
        return replay_of(batches)
    except TypeError:  # it does not support weak references, as a map
        return Replay(opening(lambda: batches), copy=True)


def _state(feed: Feed) -> Any:
    """Return the state of a feed, or the error that it has none."""
    try:
        return feed.state()
    except TypeError as error:
        return error


def _numpy_tree(batch: Batch) -> Batch:
    def convert(node: Any) -> Any:
        if is_whole(node):
            return to_arrays(node)
        return None if node is None or tree.is_nested(node) else to_numpy(node)  # None goes on to the parts of the node

    try:
        return tree.traverse(convert, batch)
    except (TypeError, ValueError):
        to_arrays(batch)  # raises an error that names the leaf
        raise
