"""Locks between processes, which the operating system releases when their process ends, however it ends.

A path goes in; an open, locked file comes out (`flock`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator

_HELD_TOO_LONG = 60.0  # seconds; the longest work under the lock is one scan of the cache
_NOT_SUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def try_lock(file: int) -> bool:
    """Lock an open file, and return whether that succeeded.

    Raises:
      OSError: the filesystem has no locks.
    """
    try:
        import fcntl
    except ImportError:
        raise OSError("the cache of remote files needs the locks of POSIX, and so Linux or macOS: copy the files first") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NOT_SUPPORTED:
            raise OSError(
                f"the filesystem of the cache has no locks ({error.strerror}): give a folder on a local disk with cache= or "
                "PENSTOCK_CACHE"
            ) from error
        raise
    return True


def unlock(file: int) -> None:
    """Release the lock of an open file. To close it is not enough if the process was forked meanwhile."""
    import fcntl

    fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def locked(path: str) -> Iterator[int]:
    """Hold the lock of a file, which is created if necessary, and give its descriptor.

    Raises:
      TimeoutError: another process holds the lock for too long, for example because it was stopped.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + _HELD_TOO_LONG
        pause = 0.0005
        while not try_lock(file):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"another process has held the lock {path!r} for {_HELD_TOO_LONG:.0f} s: is it stopped? End it, or give "
                    "another cache folder with cache= or PENSTOCK_CACHE"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        yield file
    finally:
        unlock(file)
        os.close(file)
