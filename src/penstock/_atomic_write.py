"""Write a file atomically: a path and a text go in, and a reader sees the old content or the new one, never a part."""

from __future__ import annotations

import os
from pathlib import Path


def replace(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file's content by a text.

    Args:
      path: the file; a pipe or a terminal is written to directly.
      text: the new content.
      durable: whether to wait until the content is on the disk, so that a loss of power cannot take it.

    Raises:
      OSError: the file cannot be written. The old content stays.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    part = part_of(path)
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def part_of(path: Path) -> Path:
    """Return the name of the unfinished file, in the same folder: a rename works within one file system only."""
    return path.with_name(path.name + ".part")
