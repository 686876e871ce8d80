"""Write the files of a report whole or not at all, and find out beforehand that they can be written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def replace(path: Path, text: str) -> None:
    """Replace a file's content by the text, so that a reader sees the old file or the new one and nothing between.

    Args:
      path: a pipe or a terminal is written to as it is.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    part = _part(path)
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def check_writable(reports: Mapping[str, Path | None]) -> None:
    """Check that each file can be written, before anything is measured that would be lost.

    Args:
      reports: the files that are asked for, by their flags.

    Raises:
      ValueError: two are the same, or one cannot be written.
    """
    taken: dict[Path, str] = {}
    for flag, path in reports.items():
        if path is None:
            continue
        regular = path.is_file() or not path.exists()  # a pipe or a terminal may get several reports
        if regular and (other := taken.setdefault(path.resolve(), flag)) != flag:
            raise ValueError(f"{flag} {path}: is the file of {other}; name another file")
        try:
            path.open("a").close()  # leaves an earlier report as it is
            if regular:
                _part(path).open("a").close()
                _part(path).unlink()
        except OSError as error:
            raise ValueError(f"{flag} {path}: cannot be written ({error.strerror}); name another file") from error


def _part(path: Path) -> Path:
    """Return the name of the unfinished file, in the same folder: a rename works within one file system only."""
    return path.with_name(path.name + ".part")
