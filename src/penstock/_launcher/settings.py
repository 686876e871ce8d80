"""Choose the settings with which a program starts: environment variables that were measured to be best for this machine.

On a CPU. XLA asks malloc for the temporaries of a step as one block, in every step, and frees it at the end. glibc gives a block
of this size back to the system, and the next step gets it again page by page: 130,000 page faults in each step of ViT-tiny at
batch 8, 1.4 million in ViT-small at batch 32. So glibc is told to keep what is freed, and to keep it where XLA's threads find it:

- MALLOC_MMAP_MAX_=0: no block comes from mmap, whose memory goes back when it is freed.
- MALLOC_TRIM_THRESHOLD_: the end of the heap is not given back.
- MALLOC_ARENA_MAX=1: one heap for all threads. With several, a block is freed into the heap of one thread and asked for
  by another, and heaps of threads have at most 64 MB.

The program then keeps the most memory that it ever used. `benchmarks/launcher_settings.py` compares these with huge pages,
jemalloc and tcmalloc; docs/launcher.md has the figures. On a GPU nothing is set: of the documented flags, two made no
difference to the step that we measured, and one made it 3 % faster.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass

from penstock._gpu import nvidia_gpu

# The names by which users choose or tune an allocator themselves.
_OF_USERS = ("MALLOC_", "LD_PRELOAD")
_TUNABLES = "glibc.malloc."
_NEVER = 1 << 36  # bytes: 64 GiB


@dataclass(frozen=True)
class Setting:
    """An environment variable.

    Attributes:
      name, value: as the program gets them.
      why: the reason, in a few words.
    """

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Choice:
    """The settings for this machine.

    Attributes:
      settings: what to set; may be empty.
      why_not: why nothing is set; empty if something is.
    """

    settings: tuple[Setting, ...] = ()
    why_not: str = ""


def choose(environment: Mapping[str, str] = os.environ) -> Choice:
    """Return the settings for a program that is started here with this environment."""
    if nvidia_gpu():
        return Choice(why_not="steps run on the GPU, whose memory malloc does not manage")
    if platform.libc_ver()[0] != "glibc":
        return Choice(why_not="the settings are those of glibc's malloc, and this system has another C library")
    if by_user := sorted(name for name in environment if name.startswith(_OF_USERS)):
        return Choice(why_not=f"{', '.join(by_user)} chose an allocator or its settings already")
    if _TUNABLES in environment.get("GLIBC_TUNABLES", ""):
        return Choice(why_not="GLIBC_TUNABLES has settings of malloc already")
    return Choice(
        (
            Setting("MALLOC_MMAP_MAX_", "0", "freed blocks stay in the process"),
            Setting("MALLOC_TRIM_THRESHOLD_", str(_NEVER), "the end of the heap stays, too"),
            Setting("MALLOC_ARENA_MAX", "1", "all threads share what was freed"),
        )
    )
