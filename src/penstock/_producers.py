"""What a `PrefetchPipeline` works with: its producers, what ends it, and how long things take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Exhausted(Exception):  # noqa: N818 - no error
    """Raised by work that has no item of that number, and by `get` when all items were taken."""


class PipelineClosed(Exception):  # noqa: N818 - no error
    """Raised by `get` on a pipeline that was closed."""


class GetTimeout(Exception):  # noqa: N818 - no error
    """Raised by `get` when nothing came in time; a source may raise TimeoutErrors of its own."""


class Pace:
    """How long something takes, of late: the lesser of the last two times."""

    def __init__(self) -> None:
        self.seconds = self._last = 0.0

    def add(self, seconds: float) -> None:
        self.seconds, self._last = min(seconds, self._last), seconds


class Producers(NamedTuple):
    """The first half of a pipeline.

    Attributes:
      works: one callable a producer, from an item's number to the item. With several producers a number goes
        to whichever is free, so every callable must give the same item for the same number. A
        callable raises `Exhausted` for a number past the last.
      interrupt: called by `close` to make blocked work return.
      cleanup: called once by the last producer to end.
      may_run_inline: whether the consumer's thread may work as well, while the (only) producer does not.
    """

    works: Sequence[Callable[[int], Any]]
    interrupt: Callable[[], None] | None = None
    cleanup: Callable[[], None] | None = None
    may_run_inline: bool = False
