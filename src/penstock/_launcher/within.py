"""Apply the settings of `penstock run` to this process, where a command of penstock is the program itself."""

from __future__ import annotations

import ctypes
import os
import sys

from penstock._early import ENVIRONMENT
from penstock._launcher.settings import PRELOAD, Choice

# Parameters of mallopt, from glibc's malloc.h.
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_MAX_": -4, "MALLOC_ARENA_MAX": -8}
_LARGEST = 2**31 - 1  # of mallopt's int; the trim threshold takes -1 as "never"

# The settings that were applied, for this process and those that it starts: one of them tells the user.
_APPLIED = "PENSTOCK_APPLIED"


def apply(choice: Choice) -> None:
    """Apply settings to this process, and to those that it starts. Call it before JAX starts its threads.

    An allocator is loaded only when a process starts. So for another one than glibc's, this process starts again, with the same
    arguments and the same process id, and gets here with nothing left to apply.

    glibc reads its variables only when a process starts, so here `mallopt` gets the same values. An arena that a thread has
    already made is not taken back, but XLA's threads get the main one.
    """
    variables = choice.variables
    if not variables:
        return
    variables[_APPLIED] = " ".join(f"{name}={value}" for name, value in variables.items())
    if PRELOAD in variables:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**ENVIRONMENT, **variables})
    os.environ.update(variables)
    for name in _MALLOPT.keys() & variables:
        value = int(variables[name])
        ctypes.CDLL(None).mallopt(_MALLOPT[name], value if value <= _LARGEST else -1)


def say_what_was_applied() -> None:
    """Print a line to standard error if settings were applied. A command calls it when its arguments have proved usable."""
    if applied := os.environ.get(_APPLIED):
        print(f"penstock: started with the settings of penstock run: {applied}", file=sys.stderr)
