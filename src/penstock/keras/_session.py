"""The state of threaded epochs in this process: whether they are on, and the statistics of the runs so far.

`_replace_iterator` changes it; `_epoch_iterator` and `_data_adapter` read it. It is a module of its own so that these do not
import each other.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from penstock._feed.stats import Stats

_REMEMBERED = 64
"""Runs whose statistics are kept: a process may train for months."""


class ThreadedEpochs:
    """The statistics of threaded epochs since they were turned on."""

    def __init__(self) -> None:
        self._runs: deque[list[Stats]] = deque(maxlen=_REMEMBERED)

    def begin(self) -> list[Stats]:
        """Begin a run, and return the list for its statistics."""
        run: list[Stats] = []
        self._runs.append(run)
        return run

    def stats(self) -> list[Stats]:
        """Return the statistics of the last 64 runs, in the order in which they began to read.

        A run is a `fit`, `evaluate` or `predict`, or the validation of a `fit`. The epochs of a run are added up. The time
        between epochs is left out.
        """
        return [stats for run in self._runs for stats in run]


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
