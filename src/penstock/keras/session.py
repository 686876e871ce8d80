"""The state of threaded epochs in this process: whether they are on, the statistics of the runs so far, and the saver of a run.

replace_iterator.py and checkpoint.py change it; epoch_iterator.py reads it. It is a file of its own so that their imports make no
circle.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Any, NamedTuple, Protocol

from penstock.feed.stats import LaterStats, Stats

_REMEMBERED = 64  # runs whose statistics are kept: a process may train for months


class ThreadedEpochs:
    """The statistics of threaded epochs since they were turned on."""

    def __init__(self) -> None:
        self._runs: deque[Run] = deque(maxlen=_REMEMBERED)

    def begin(self) -> Run:
        """Begin a run, and return its statistics."""
        run = Run()
        self._runs.append(run)
        return run

    def stats(self) -> list[Stats]:
        """Return the statistics of the last 64 runs, in the order in which they began to read.

        A run is a `fit`, `evaluate` or `predict`, or the validation of a `fit`. The epochs of a run are added up. The time
        between epochs is left out.
        """
        return [stats for run in self._runs for stats in run.stats()]


class Run:
    """The statistics of one run: the sum over its feeds."""

    def __init__(self) -> None:
        self._sum: Stats | None = None
        self._later: deque[LaterStats] = deque()  # of feeds that ended, whose last steps may still run

    def add(self, later: LaterStats) -> None:
        """Add the statistics of a feed that has ended, without waiting for its last steps."""
        self._later.append(later)
        while self._later and self._later[0].meter.settled:
            self._add_first()

    def stats(self) -> list[Stats]:
        """Return the sum, after the last steps of all feeds; empty if there was no feed."""
        while self._later:
            self._add_first()
        return [] if self._sum is None else [self._sum]

    def _add_first(self) -> None:
        stats = self._later.popleft()()
        self._sum = stats if self._sum is None else self._sum + stats


class Session:
    """The state of threaded epochs in this process. A run keeps the state with which it began.

    Attributes:
      epochs: the statistics; None while threaded epochs are off.
      original: Keras's own class of epoch iterators, while ours replaces it; None otherwise.
      data_was_made: whether our class stays in place for data made by `data`, also while threaded epochs are off.
    """

    epochs: ThreadedEpochs | None = None
    original: Any = None
    data_was_made = False


class Position(NamedTuple):
    """A place between two executions of a `fit`, from which another one continues.

    Attributes:
      step: number of batches of the epoch, as Keras counts them: a multiple of `steps_per_execution`.
      seen: number of batches that Keras has counted since its iterator over the data began.
      consumed: number of batches taken since the data began.
      length: number of batches of the data, as far as Keras knows; None if it does not.
      feed: the position in the data, in the form of `Feed.state`.
    """

    step: int
    seen: int
    consumed: int
    length: int | None
    feed: Any


class Saver(Protocol):
    """The part of a `CheckpointRun` that the epoch iterator of its `fit` calls."""

    def attach(self, iterator: Any) -> Position | None:
        """Note the epoch iterator of the `fit`, and return the position from which it continues; None for the beginning.

        Raises:
          TypeError: its data is not the data that is saved.
        """
        ...

    def awaiting(self, position: Position) -> contextlib.AbstractContextManager[None]:
        """Surround the wait for the batch at a position."""
        ...

    def before_execution(self, position: Position) -> None:
        """Save at a position if it is time to. The next batch has come."""
        ...


_expected = threading.local()  # its attribute `saver` is set between `expect` and `expected`


def expect(saver: Saver | None) -> None:
    """Set the saver of the next epoch iterator that is made on this thread; None for no saver."""
    _expected.saver = saver


def expected() -> Saver | None:
    """Return the saver of the epoch iterator that is made now, and unset it."""
    saver: Saver | None = getattr(_expected, "saver", None)
    _expected.saver = None
    return saver
