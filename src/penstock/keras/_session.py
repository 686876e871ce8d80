"""The state of threaded epochs in this process: whether they are on, and the statistics of the runs so far.

`_replace_iterator` changes it; `_epoch_iterator` and `_data_adapter` read it. It is a module of its own so that these do not
import each other.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from penstock._feed.stats import LaterStats, Stats

_REMEMBERED = 64
"""Runs whose statistics are kept: a process may train for months."""


class Run:
    """The statistics of one run: those of its feeds, added up."""

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


class ThreadedEpochs:
    """The statistics of threaded epochs since they were turned on."""

    def __init__(self) -> None:
        self._runs: deque[Run] = deque(maxlen=_REMEMBERED)

    def begin(self) -> Run:
        """Begin a run."""
        run = Run()
        self._runs.append(run)
        return run

    def stats(self) -> list[Stats]:
        """Return the statistics of the last 64 runs, in the order in which they began to read.

        A run is a `fit`, `evaluate` or `predict`, or the validation of a `fit`. The epochs of a run are added up. The time
        between epochs is left out.
        """
        return [stats for run in self._runs for stats in run.stats()]


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
