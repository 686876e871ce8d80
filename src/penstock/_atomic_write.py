"""Replace a file atomically: readers, and other processes that write it, see the old content or the new one, never a part."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield the path of a new file, which replaces `path` when the block ends, and is removed if the block fails.

    Args:
      durable: whether to wait until the content and the name are on the disk, so that a loss of power cannot take them.

    Raises:
      OSError: the file cannot be written. The old content stays.
    """
    part = part_of(path)
    try:
        yield part
        if durable:
            _flush(part, os.O_RDWR)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    if durable:
        with contextlib.suppress(OSError):  # some systems cannot flush a folder
            _flush(path.parent, os.O_RDONLY)


def replace(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file's content by a text. A pipe or a terminal is written to directly.

    Raises:
      OSError: the file cannot be written. The old content stays.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    with replacing(path, durable=durable) as part:
        part.write_text(text, encoding="utf-8")


def part_of(path: Path) -> Path:
    """Return a new name for the unfinished file, in the same folder: a rename works within one file system only."""
    return path.with_name(f"{path.name}.{os.urandom(4).hex()}.part")


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
