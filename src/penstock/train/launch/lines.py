"""Prefix each line that a process writes with its rank: chunks of bytes go in, whole lines come out.

Bytes are not decoded, so nothing that a process writes can fail here. A carriage return without a line feed ends a *frame*: a
progress bar, which the next frame overwrites on a terminal. Frames of several processes cannot be drawn over each other, so a
frame becomes a line: the last one before each line feed, and one every few seconds in between.
"""

from __future__ import annotations

import re

_FRAME_SECONDS = 5.0  # between two frames of a progress bar
_LONGEST = 64 << 20  # bytes of a line without an end, after which it is broken

_FRAMES = re.compile(rb"[^\n]*\r[^\n]*")  # a line with a carriage return


class LinePrefixer:
    """The lines of one stream of one process. One thread uses it.

    Args:
      rank: of the process.

    Example:
      >>> from penstock.train.launch.lines import LinePrefixer
      >>> lines = LinePrefixer(1)
      >>> lines.add(b"one\\ntw", 0.0), lines.add(b"o", 0.0), lines.end()
      (b'[1] one\\n', b'', b'[1] two\\n')
    """

    def __init__(self, rank: int):
        self._prefix = f"[{rank}] ".encode()
        self._partial = bytearray()  # the bytes after the last line feed
        self._shown = b""  # the frame of the present line that was written last
        self._when = 0.0  # it was written, in seconds of the caller

    def add(self, data: bytes, now: float) -> bytes:
        """Return the lines that a chunk completes, with prefixes; b"" if it completes none.

        Args:
          data: what the process wrote.
          now: the time in seconds.
        """
        self._partial += data
        feed = self._partial.rfind(b"\n", len(self._partial) - len(data))
        whole, lines = b"", b""
        if feed >= 0:
            whole = bytes(self._partial[: feed + 1])
            del self._partial[: feed + 1]
            lines = self._lines(whole)
            self._shown = b""
        if b"\r" in data:
            lines += self._frame(now)
        if len(self._partial) > _LONGEST:
            lines += self.end()
        return lines

    def end(self) -> bytes:
        """Return what the process wrote after its last line feed, as a line."""
        rest = bytes(self._partial)
        self._partial.clear()
        return self._lines(rest + b"\n") if rest else b""

    def _lines(self, whole: bytes) -> bytes:
        """Return lines with prefixes, each as its last frame. The first is left out if it is the frame that was shown."""
        if b"\r" in whole:
            first, _, others = whole.partition(b"\n")
            if self._shown and _last_frame(first) == self._shown:
                whole = others
            whole = _FRAMES.sub(lambda line: _last_frame(line[0]), whole)
        return self._prefix + whole[:-1].replace(b"\n", b"\n" + self._prefix) + b"\n" if whole else b""

    def _frame(self, now: float) -> bytes:
        """Return the last whole frame of the present line if it is time for one, and drop those before it."""
        frames, _, rest = bytes(self._partial).rpartition(b"\r")
        if not _:
            return b""
        frame = _last_frame(frames)
        self._partial[:] = frame + b"\r" + rest
        if not frame or frame == self._shown or now < self._when + _FRAME_SECONDS:
            return b""
        self._shown, self._when = frame, now
        return self._prefix + frame + b"\n"


def _last_frame(line: bytes) -> bytes:
    """Return the last part between carriage returns that is not blank."""
    return next((frame for frame in reversed(line.split(b"\r")) if frame.strip()), b"")
