"""Define the producers that a `PrefetchPipeline` takes, and the exceptions that its `get()` raises."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Exhausted(Exception):  # noqa: N818 - no error
    """The exception that work raises for a number past the last, and that `get` raises when all items were taken."""


class PipelineClosed(Exception):  # noqa: N818 - no error
    """The exception that `get` raises on a closed pipeline."""


class GetTimeout(Exception):  # noqa: N818 - no error
    """The exception that `get` raises when no item came in time. It is not a TimeoutError, which a source may raise itself."""


class Producers(NamedTuple):
    """The producers of a pipeline, and how to stop them.

    Attributes:
      works: one callable for each producer, from an item's number to the item. With several producers, a number goes
        to any that is free, so every callable must return the same item for the same number. A callable raises
        `Exhausted` for a number past the last.
      interrupt: called by `close` to make blocked work return.
      cleanup: called once by the last producer to end.
    """

    works: Sequence[Callable[[int], Any]]
    interrupt: Callable[[], None] | None = None
    cleanup: Callable[[], None] | None = None


def clean_up(cleanup: Callable[[], None]) -> None:
    """Call the `cleanup` of producers. Its error becomes a warning, which hides no earlier error and loses no item."""
    try:
        cleanup()
    except Exception as error:
        warnings.warn(f"closing a source failed: {error!r}", RuntimeWarning, stacklevel=1)


def without_stop_iteration(error: BaseException, number: int) -> BaseException:
    """Return an error, or a RuntimeError for StopIteration, which would end the consumer's loop silently.

    Args:
      error: raised by a user's function.
      number: the item that it was making.
    """
    if not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"StopIteration was raised while making item {number}")
    wrapped.__cause__ = error
    return wrapped
