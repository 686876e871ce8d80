"""What is done between warm-up and timing, in whichever interpreter a variant runs."""

from __future__ import annotations

import gc


def settle() -> None:
    """Call before the clock starts: what was imported, compiled and warmed up is collected now, and not looked at again.

    A full collection of what JAX and the libraries import stops all threads for some 40 ms, in whichever step or variant
    happens to make the allocation that sets it off.
    """
    gc.collect()
    gc.freeze()
