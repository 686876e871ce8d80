"""Call a store until it answers, but not for ever.

A function that reads from a store goes in. Its result comes out, or one error of the operating system's kind that names the URL,
the reason, the attempts and the remedy. Attempts that failed for a passing reason are repeated with exponential backoff.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from penstock.data.remote.reasons import explain, passes, reason
from penstock.data.remote.url import shown

T = TypeVar("T")

ATTEMPTS = 6  # in a row without a new byte; with their pauses, these take 8 seconds
_FIRST_PAUSE = 0.25  # seconds; the pauses double


class NoAnswerError(TimeoutError):
    """An error for a call that had no result in time, though its client may still wait for one."""


class Patience:
    """The attempts that are left to read one file or listing.

    Args:
      url: for errors.
      timeout: seconds without progress after which it is given up, over all attempts.
      stop: set if the result is not wanted any more.
    """

    def __init__(self, url: str, timeout: float, stop: threading.Event | None = None):
        self._url, self._timeout = url, timeout
        self._stop = stop or threading.Event()
        self._began = time.monotonic()
        self._last: Exception | None = None
        self.progress()

    def progress(self) -> None:
        """Begin to count anew, after new bytes."""
        self._attempts, self._since = 0, time.monotonic()

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on a thread, and wait for it as long as there is time.

        A client may wait for a dead connection for ever, and Python cannot interrupt that. Such a thread is left behind.

        Raises:
          NoAnswerError: there is no result in time.
          ConnectionAbortedError: the result is not wanted any more.
        """
        if self._stop.is_set():
            raise ConnectionAbortedError("given up, because another file failed")
        results: queue.SimpleQueue[tuple[bool, T | BaseException]] = queue.SimpleQueue()

        def work() -> None:
            try:
                results.put((True, function()))
            except BaseException as error:
                results.put((False, error))

        threading.Thread(target=work, name="penstock-remote", daemon=True).start()
        try:
            done, result = results.get(timeout=max(0.01, self._since + self._timeout - time.monotonic()))
        except queue.Empty:
            before = f"; the attempt before it failed with {reason(self._last)}" if self._last else ""
            raise NoAnswerError(f"no answer within timeout={self._timeout:g} s{before}") from None
        if done:
            return result  # type: ignore[return-value]  # `done` tells which of the two it is
        raise result  # type: ignore[misc]  # likewise

    def failed(self, error: Exception) -> None:
        """Sleep before the next attempt.

        Raises:
          OSError: the reason does not pass, or there is neither time nor an attempt left.
        """
        self._attempts += 1
        self._last = error
        pause = _FIRST_PAUSE * 2 ** (self._attempts - 1)
        late = time.monotonic() + pause > self._since + self._timeout
        if not passes(error) or self._attempts >= ATTEMPTS or late or self._stop.is_set():
            explained = explain(error, self._url, self._attempts, time.monotonic() - self._began)
            # The causes of a client have the URL in them, with its secrets.
            raise explained from (None if explained is error or shown(self._url) != self._url else error)
        self._stop.wait(pause)

    def insist(self, function: Callable[[], T]) -> T:
        """Call a function until it succeeds.

        Raises:
          OSError: it fails for a reason that does not pass, or too often.
        """
        while True:
            try:
                return self.call(function)
            except Exception as error:
                self.failed(error)
