"""Keep Python's garbage collector out of what is timed, in whichever interpreter a variant runs."""

from __future__ import annotations

import gc


def freeze_gc() -> None:
    """Collect all garbage now, and never look again at the objects that remain. Call it between warm-up and timing.

    A full collection of what JAX and the libraries import stops all threads for some 40 ms, in whichever step or variant
    happens to make the allocation that sets it off.
    """
    gc.collect()
    gc.freeze()
