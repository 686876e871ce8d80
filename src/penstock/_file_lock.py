"""Lock files against other processes, by the operating system: `file_lock`."""

from __future__ import annotations

import errno
import os
from typing import Any

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""The errors of a file system without locks."""

_PAUSE = 0.002  # seconds between two tries to get a lock


def file_lock(path: str | os.PathLike[str], seconds: float = 0.0) -> Any:
    """Return a `filelock.FileLock` whose `acquire()` waits for so many seconds, and creates the file if necessary.

    Any thread may release it. It ends with this process, also if a forked child outlives it. A file system without locks is an
    error (`NO_LOCKS`): the marker file that filelock would use there outlives a killed process.
    """
    import filelock  # takes 40 ms, and is needed by few

    return filelock.FileLock(path, timeout=seconds, poll_interval=_PAUSE, thread_local=False, fallback_to_soft=False)
