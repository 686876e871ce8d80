"""Check before a measurement that the files of its report can be written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock._atomic_write import part_of


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
                part = part_of(path)
                part.touch()
                part.unlink()
        except OSError as error:
            raise ValueError(f"{flag} {path}: cannot be written ({error.strerror}); name another file") from error
