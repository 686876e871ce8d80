"""Write to stdout and stderr without waiting: blocks of lines go in, and are written in order, as much as fits.

There is one queue for both, and a block is written to its end before the next one begins. So lines are not mixed even if both
lead to the same terminal or file. The launcher asks `select` whether the first block's descriptor takes more, and writes at
most as much as a pipe then takes at once. So a reader that has stopped cannot keep the launcher from forwarding a signal.
"""

from __future__ import annotations

import os
from collections import deque

_AT_ONCE = 4096  # bytes that a pipe takes if `select` says that it is ready (PIPE_BUF on Linux)
_FULL = 4 << 20  # waiting bytes after which the launcher stops reading from its processes


class Output:
    """The queue of what is to be written. One thread uses it."""

    def __init__(self) -> None:
        self._blocks: deque[tuple[int, memoryview]] = deque()
        self._waiting = 0
        self._broken: set[int] = set()  # descriptors that nobody reads any more

    @property
    def descriptor(self) -> int | None:
        """Return the descriptor for which the first block waits; None if there is none."""
        return self._blocks[0][0] if self._blocks else None

    @property
    def full(self) -> bool:
        """Return whether no more should be read, so that the processes wait for the reader of their output."""
        return self._waiting > _FULL

    def put(self, descriptor: int, lines: bytes) -> None:
        """Add lines for a descriptor: 1 or 2."""
        if lines and descriptor not in self._broken:
            self._blocks.append((descriptor, memoryview(lines)))
            self._waiting += len(lines)

    def say(self, text: str) -> None:
        """Add a line of the launcher itself."""
        self.put(2, f"penstock launch: {text}\n".encode())

    def write(self) -> None:
        """Write some bytes of the first block.

        Raises:
          OSError: nobody reads the descriptor any more. All that waits for it is dropped, and all that is added later.
        """
        descriptor, block = self._blocks.popleft()
        try:
            written = os.write(descriptor, block[:_AT_ONCE])
        except BlockingIOError:
            written = 0
        except OSError:
            self._broken.add(descriptor)
            self._blocks = deque(each for each in self._blocks if each[0] != descriptor)
            self._waiting = sum(len(each) for _, each in self._blocks)
            raise
        self._waiting -= written
        if written < len(block):
            self._blocks.appendleft((descriptor, block[written:]))
