"""Start daemon threads that belong together, and end all of them before the interpreter exits."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

import jax  # noqa: F401 - registers its exit hook first, so that ours, below, runs while JAX still works

JOIN_SECONDS = 0.5


class Threads:
    """Daemon threads that are waited for together.

    Args:
      context: entered once on each thread around all of its work.
      name: the beginning of the names of the threads.
    """

    def __init__(self, context: Callable[[], contextlib.AbstractContextManager[object]], name: str = "penstock"):
        self._context, self._name = context, name
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Start a thread that runs `work`, and calls `failed` with the exception that the context or the work raises.

        The thread drops its references to both callables when it ends, because they usually refer to the owner of the threads.
        """
        thread = threading.Thread(target=self._run, args=(work, failed), name=f"{self._name}-{len(self._threads)}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def join(self, deadline: float) -> None:
        """Wait until all threads but the calling one have ended, or until `deadline` (on `time.monotonic`)."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, work: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        try:
            with self._context():
                work()
        except BaseException as error:
            failed(error)


class Closes(Protocol):
    """An owner of threads that can tell them to end, and then wait for them."""

    def close(self, wait: bool = True) -> None:
        """Tell the threads to end."""

    def join(self, deadline: float) -> None:
        """Wait for the threads."""


_owners: weakref.WeakSet[Closes] = weakref.WeakSet()


def close_at_exit(owner: Closes) -> None:
    """Close an owner of threads at interpreter exit. It is stored as a weak reference, and skipped if it no longer exists."""
    _owners.add(owner)


@atexit.register
def _close_all() -> None:
    """End all threads while the interpreter and the JAX backends still work."""
    deadline = time.monotonic() + JOIN_SECONDS
    owners = list(_owners)
    for owner in owners:
        owner.close(wait=False)
    for owner in owners:
        owner.join(deadline)
