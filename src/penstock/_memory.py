"""Let the C library keep the memory of freed arrays for the next batch."""

from __future__ import annotations

import functools
import os
import platform

import numpy as np

_MB = 1 << 20

# The largest block that glibc may keep (DEFAULT_MMAP_THRESHOLD_MAX), and the bytes of it that a program may use.
_LARGEST = 32 * _MB
LARGEST_KEPT = _LARGEST - (_MB >> 4)

# Parameters of mallopt, from glibc's malloc.h, and the names by which users set them before a program starts.
_TRIM_THRESHOLD, _TOP_PAD = -1, -2
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
_TUNABLES = ("malloc.trim_threshold", "malloc.top_pad")


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep freed blocks of up to 32 MB for the next batch, from now on in this process.

    Memory that a program gets from the system costs a page fault for every 4 KB, which is several times the cost of copying them.
    Three rules of glibc (`man mallopt`) return freed memory to the system:

    - A block above M_MMAP_THRESHOLD is returned when it is freed. The threshold is the size of the largest block of up to 32 MB
      that was freed, by default 128 KB. So one such block is freed here, which is never written to.
    - Free memory at the end of the heap of the main thread is returned from M_TRIM_THRESHOLD on, up to M_TOP_PAD.
    - Other threads, such as XLA's, have heaps of 64 MB. One that is free is returned if the one before it has M_TOP_PAD
      free (`heap_trim` in malloc/arena.c), by default 128 KB. So a few batches of 12 MB would get and return a heap again and
      again. With 32 MB, a heap is returned only if the largest block still fits into the one before it.

    Settings of the user for the last two stay. Other C libraries are left as they are.
    """
    np.empty(LARGEST_KEPT, np.uint8)
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    by_user = any(name in os.environ for name in _VARIABLES) or any(name in tunables for name in _TUNABLES)
    if platform.libc_ver()[0] == "glibc" and not by_user:
        import ctypes

        libc = ctypes.CDLL(None)
        libc.mallopt(_TOP_PAD, _LARGEST)
        libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST + _LARGEST)  # twice the largest block, as glibc has it, besides the pad
