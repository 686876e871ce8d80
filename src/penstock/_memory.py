"""Let the C library keep the memory of freed arrays, so that the next batch does not have to get it from the system again."""

from __future__ import annotations

import functools

import numpy as np

# The largest block from which glibc learns (DEFAULT_MMAP_THRESHOLD_MAX, 32 MB), without what it adds to a block.
_LARGEST = (32 << 20) - (64 << 10)


@functools.cache
def keep_freed_memory() -> None:
    """Free one large block, once in a process.

    Memory that a program gets from the system costs a page fault for every 4 KB, which is several times the cost of copying them.
    glibc returns free memory at the end of its heap to the system, from a threshold on. The threshold is twice the size of the
    largest block of up to 32 MB that was freed (`man mallopt`, M_MMAP_THRESHOLD). So freeing one such block, which is never
    written to, makes all later batches keep their memory. Other C libraries ignore it.
    """
    np.empty(_LARGEST, np.uint8)
