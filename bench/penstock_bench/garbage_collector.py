"""Keep Python's garbage collector out of what is timed, in whichever interpreter a variant runs."""

from __future__ import annotations

import gc


def freeze_gc() -> None:
    """Collect all garbage now, and exclude the remaining objects from later collections. Call it between warm-up and timing.

    After JAX and other libraries are imported, a full collection stops all threads for about 40 ms. It happens in whichever
    step or variant makes the allocation that triggers it.
    """
    gc.collect()
    gc.freeze()
