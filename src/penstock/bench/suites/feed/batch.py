"""A batch on the device, as consumers of all variants see it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax

Batch = dict[str, Any]

# JAX's own, which has no annotations.
block_until_ready: Callable[[Batch], Batch] = jax.block_until_ready


def settle() -> None:
    """Call before the clock starts: what was imported and warmed up is collected now, and not looked at again.

    A full collection of what JAX and the libraries import stops all threads for some 40 ms, in whichever variant
    happens to make the allocation that sets it off.
    """
    gc.collect()
    gc.freeze()
