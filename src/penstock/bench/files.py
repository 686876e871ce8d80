"""The files that a benchmark's reports are written to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def replace(path: Path, text: str) -> None:
    """Write a file whole, or leave it as it was."""
    if path.exists() and not path.is_file():  # a pipe or a terminal
        path.write_text(text, encoding="utf-8")
        return
    part = _part(path)
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _part(path: Path) -> Path:
    """Beside the file, as what replaces it must be on the same file system."""
    return path.with_name(path.name + ".part")


def check(reports: Mapping[str, Path | None]) -> None:
    """Find a file that a report cannot be written to while nothing was measured that would be lost.

    Args:
      reports: the files that are asked for, by their flags.

    Raises:
      ValueError: two are the same, or one cannot be written.
    """
    taken: dict[Path, str] = {}
    for flag, path in reports.items():
        if path is None:
            continue
        regular = path.is_file() or not path.exists()  # and no pipe or terminal, which may get several
        if regular and (other := taken.setdefault(path.resolve(), flag)) != flag:
            raise ValueError(f"{flag} {path}: is the file of {other}; name another file")
        try:
            path.open("a").close()  # leaves an earlier report as it is
            if regular:
                _part(path).open("a").close()
                _part(path).unlink()
        except OSError as error:
            raise ValueError(f"{flag} {path}: cannot be written ({error.strerror}); name another file") from error
