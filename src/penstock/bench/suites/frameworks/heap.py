"""Bring the C library's memory into the state of a process that has run for a while.

Memory that a process has not used before comes from the system page by page, which here takes seconds of the first steps of a
training. Earlier allocations decide which memory glibc keeps for the next step and which it gives back to the system. Each
framework reaches a steady state by itself, but some only after ten steps of seconds each.
"""

from __future__ import annotations

import ctypes
import os
import platform

import numpy as np

# The largest block that glibc may keep when it is freed, in bytes: M_MMAP_THRESHOLD of mallopt(3) at its largest, with room
# for what malloc adds. Larger blocks come from the system anew, unless a hole in the kept memory fits them.
LARGEST_KEPT = (32 << 20) - (64 << 10)


def free_a_large_block() -> None:
    """Free a large block, so that glibc serves later blocks up to `LARGEST_KEPT` from memory that it has.

    Without this the second step takes up to 1.3 times what the third does in all frameworks.
    """
    np.empty(LARGEST_KEPT, np.uint8)


def grow() -> None:
    """Make the heap as large as half of the machine's memory, up to 64 GiB, for good; none of it is used before it is needed.

    For frameworks whose heap grows until it has a hole for every block, as PyTorch's does. glibc gives the end of the heap back
    when it is free, so a block is left there. Takes effect after `free_a_large_block`, and nowhere but in glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    size = LARGEST_KEPT // 2
    wanted = min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2, 64 << 30)
    blocks = [block for _ in range(wanted // size) if (block := libc.malloc(size))]  # the system may refuse some
    for block in blocks[:-1]:
        libc.free(block)
