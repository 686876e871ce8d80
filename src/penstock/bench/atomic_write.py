"""Write the files of a report atomically, and check beforehand that they can be written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def replace(path: Path, text: str) -> None:
    """Replace a file's content by the text atomically: a reader sees the old content or the new one, never a part.

    Args:
      path: the file; a pipe or a terminal is written to directly.
      text: the new content.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    part = _part(path)
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def check_writable(reports: Mapping[str, Path | None]) -> None:
    """Check that each file can be written, so that no measurement is lost for want of a file.

    Args:
      reports: from a command-line flag to the file that it names; None where the flag was not given.

    Raises:
      ValueError: two flags name the same file, or a file cannot be written.
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
