"""Bring the heap of the C library into the steady state of a long-running process.

The system provides fresh memory page by page, which takes seconds in the first steps of a training. Earlier allocations decide
which memory glibc keeps for the next step, and which it returns to the system. Every framework reaches a steady state by itself,
but some only after ten steps, of seconds each.
"""

from __future__ import annotations

import ctypes
import os
import platform

import numpy as np

# Larger blocks are requested from the system each time, unless they fit into a hole of the kept memory.
from penstock._memory import LARGEST_KEPT as LARGEST_KEPT


def free_a_large_block() -> None:
    """Free a large block, so that glibc serves later blocks up to `LARGEST_KEPT` from memory that it keeps.

    Without this, the second step takes up to 1.3 times as long as the third in all frameworks.
    """
    np.empty(LARGEST_KEPT, np.uint8)


def grow() -> None:
    """Extend the heap permanently to half of the machine's memory, up to 64 GiB. Pages are allocated only when they are used.

    Use it for frameworks such as PyTorch, whose heap grows until it has a free block for every allocation. glibc returns the end
    of the heap to the system when it is free, so one block is left there. It works only after `free_a_large_block`, and only in
    glibc.
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
