"""Pause Python's cyclic garbage collector while a plan is made.

Planning builds millions of objects that live until the plan is found and form almost no cycles. The collector would visit them
again and again.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Pause the garbage collector in a `with` block. It stays off if it was off before.

    It is a setting of the whole process: if another thread ends its own block first, the collector runs again earlier.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
