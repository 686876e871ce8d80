"""The producers that a `PrefetchPipeline` is given, and the exceptions that end a `get()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Exhausted(Exception):  # noqa: N818 - no error
    """The exception of work that has no item of that number, and of `get` when all items were taken."""


class PipelineClosed(Exception):  # noqa: N818 - no error
    """The exception of `get` on a pipeline that was closed."""


class GetTimeout(Exception):  # noqa: N818 - no error
    """The exception of `get` when nothing came in time. No TimeoutError: a source may raise one of its own."""


class Producers(NamedTuple):
    """The first half of a pipeline.

    Attributes:
      works: one callable for each producer, from an item's number to the item. With several producers a number goes to
        any that is free, so every callable must give the same item for the same number. A callable raises
        `Exhausted` for a number past the last.
      interrupt: called by `close` to make blocked work return.
      cleanup: called once by the last producer to end.
      may_run_inline: whether the consumer's thread may do the work while the producer sleeps; for a single producer.
    """

    works: Sequence[Callable[[int], Any]]
    interrupt: Callable[[], None] | None = None
    cleanup: Callable[[], None] | None = None
    may_run_inline: bool = False
