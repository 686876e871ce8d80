"""Count steps and batches for `penstock launch --stall`, in a small file that this process and the launcher map.

The launcher names the file in an environment variable of each of its processes. Everywhere else, `beat` and `batch` do nothing.

A training loop calls `beat(step)` after each step. Every feed calls `batch()` for each batch that it hands over, so a loop of
your own counts too. Each counter only grows. The launcher takes a change of either as progress, and compares ranks by both, steps
first. So a continued run may begin at step 1,000, and an evaluation may have a feed of its own. One counter for both would be
wrong: a rank that is a batch ahead of its step would look like one that is a step ahead.

Nothing is locked. Each number is one aligned word, which is written in one piece. The process writes, the launcher reads, and
it uses its own clock for the time between two changes. Two threads that count at once may lose one count, which changes no
decision.

The import of this module also registers a signal, at which faulthandler writes the stacks of all threads to a second file. It
does so without the interpreter, so it works while the main thread waits inside a collective.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal

COORDINATOR, COUNT, INDEX = "PENSTOCK_COORDINATOR", "PENSTOCK_PROCESS_COUNT", "PENSTOCK_PROCESS_INDEX"
"""The environment variables by which the launcher tells each process its place."""
FILE = "PENSTOCK_HEARTBEAT"
"""The environment variable with the path of the counters. The file of the stacks has `STACKS` at the end of this path."""
LAUNCHER = "PENSTOCK_LAUNCHER"
"""The environment variable with the process id of the launcher."""
STACKS = ".stacks"
REGISTERED, STEPS, STEP, BATCHES = range(4)
"""The words of the file, 8 bytes each: whether the signal is registered, steps made, number of the last step, batches had."""
SIZE = 4 * 8
STACKS_SIGNAL: int = getattr(signal, "SIGUSR2", 0)
"""The signal at which a process writes its stacks; 0 on Windows, where there is no launcher."""


def beat(step: int) -> None:
    """Count a step. The launcher shows its number, which need not begin at 0."""
    if _words is not None:
        _words[STEP] = step
        _words[STEPS] += 1


def batch() -> None:
    """Count a batch that this process has taken from a feed."""
    if _words is not None:
        _words[BATCHES] += 1


def is_launched() -> bool:
    """Return whether `penstock launch` started this very process, and not one that started this one.

    Worker processes and commands that a rank starts inherit its environment, and must not act in its name.
    """
    return os.environ.get(LAUNCHER) == str(os.getppid())


def _map() -> memoryview | None:
    """Map the counters and register the signal; None if no launcher looks at them."""
    path = os.environ.get(FILE)
    if path is None or not is_launched():
        return None
    with open(path, "r+b") as file:
        words = memoryview(mmap.mmap(file.fileno(), SIZE)).cast("q")
    if STACKS_SIGNAL:
        stacks = os.open(path + STACKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # never closed: faulthandler writes to it
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        words[REGISTERED] = 1
    os.register_at_fork(after_in_child=_forget)
    return words


def _forget() -> None:
    """Count nothing in a forked child, which shares the memory of its parent's counters."""
    global _words  # noqa: PLW0603 - there is one file for the process
    _words = None


_words = _map()
