"""A piece of work that is always the same, run between blocks: it shows how fast the machine was at that moment.

It is half arithmetic in the caches and half copying through memory, because other users of a machine slow both down. It takes a
few milliseconds. It runs on the calling thread alone, so that no thread of a library still spins when the next block begins.
"""

from __future__ import annotations

import functools
import time

import numpy as np

_CACHED = 1 << 15  # float32: 128 KB
_PASSES = 60
_COPIED = 4 << 20  # float32: 16 MB, more than a core's caches


@functools.cache
def _operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    cached, source = np.linspace(1, 2, _CACHED, dtype=np.float32), np.ones(_COPIED, np.float32)
    return cached, source, np.zeros_like(source)


def reference_seconds() -> float:
    """Run the kernel once, and return its duration in seconds."""
    cached, source, target = _operands()
    begin = time.perf_counter()
    for _ in range(_PASSES):
        np.sqrt(cached)
    np.copyto(target, source)
    return time.perf_counter() - begin
