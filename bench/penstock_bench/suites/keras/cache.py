"""Keep files that all runs share, in the folder that the environment variable PENSTOCK_BENCH_CACHE names."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_VARIABLE = "PENSTOCK_BENCH_CACHE"


@contextlib.contextmanager
def at_hand() -> Iterator[None]:
    """Make sure that the folder exists: the harness's, or a temporary one for the duration of the block."""
    if os.environ.get(_VARIABLE):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", ignore_cleanup_errors=True) as folder:
        os.environ[_VARIABLE] = folder
        try:
            yield
        finally:
            del os.environ[_VARIABLE]


def made_once(name: str, write: Callable[[Path], None]) -> Path:
    """Return the file of this name in the folder; `write` writes it unless it is there."""
    path = Path(os.environ[_VARIABLE]) / name
    if not path.exists():
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=path.parent) as folder:
            whole = Path(folder) / name
            write(whole)
            whole.replace(path)  # atomic, so that no process sees a part of the file
    return path
