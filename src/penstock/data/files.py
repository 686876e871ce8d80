"""List the files at paths, patterns and URLs, and read them by number, wherever they are.

`LocalFiles` and `penstock.data.remote.files.RemoteFiles` are the two kinds of `Files`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from penstock._bytes import counted
from penstock.data.records import expand
from penstock.data.remote.files import RemoteFiles, as_remote
from penstock.data.remote.url import is_url

Paths = Any  # str | os.PathLike | Sequence of these | RemoteFiles


class Files(Protocol):
    """Files in a fixed order. They may be used by several threads, and pickled."""

    @property
    def names(self) -> list[str]:
        """Return the path or URL of each file, for messages."""

    def __len__(self) -> int:
        """Return the number of files."""

    def describe(self) -> str:
        """Return a text that differs from the text of other files."""

    def using(self, index: int) -> AbstractContextManager[str]:
        """Give the local path of one file inside of a `with`."""

    def prefetch(self, index: int) -> None:
        """Begin to download a file that will soon be used."""


class LocalFiles:
    """Files of this machine, which exist."""

    def __init__(self, paths: Sequence[str]):
        self._paths = list(paths)

    @property
    def names(self) -> list[str]:
        return self._paths

    def __len__(self) -> int:
        return len(self._paths)

    def describe(self) -> str:
        """Return the number of files, their bytes, and a hash of their names and sizes."""
        sizes = [os.path.getsize(path) for path in self._paths]
        made_from = repr([(os.path.basename(path), size) for path, size in zip(self._paths, sizes, strict=True)])
        version = hashlib.sha256(made_from.encode()).hexdigest()[:12]
        return f"{counted(len(self), 'file')} of {counted(sum(sizes), 'byte')}, version {version}"

    @contextmanager
    def using(self, index: int) -> Iterator[str]:
        yield self._paths[index]

    def prefetch(self, index: int) -> None:
        """Do nothing: the file is here."""


def list_files(paths: Paths) -> Files:
    """List files of this machine or a store.

    Args:
      paths: one path or URL, or several; each a file, a glob pattern, or a range of names such as "shard-{000..127}.tar". Or
        `RemoteFiles`. The files of a pattern are sorted by name.

    Raises:
      FileNotFoundError: there is no file at a path or pattern.
      IsADirectoryError: a path is a folder.
      TypeError: something else than paths was given.
      ValueError: there are no paths, or a range of names is empty.
    """
    if isinstance(paths, RemoteFiles):
        return paths
    many = list(paths) if isinstance(paths, Iterable) and not isinstance(paths, (str, bytes)) else [paths]
    if wrong := [path for path in many if not isinstance(path, (str, os.PathLike))]:
        raise TypeError(f"{wrong[0]!r} is not a path: needs a path or URL as text, a pathlib.Path, or a list of these")
    if not many:
        raise ValueError(f"paths={paths!r}: needs at least one path or URL")
    any(map(is_url, many))  # a URL as a pathlib.Path is an error
    given: list[str] = [name for path in many for name in _expand_range(os.fspath(path))]
    if (files := as_remote(given)) is not None:
        return files
    found = expand(given)
    if folder := next((path for path in found if os.path.isdir(path)), None):
        raise IsADirectoryError(f"{folder!r} is a folder: give a pattern such as {os.path.join(folder, '*')!r}")
    return LocalFiles(found)


def _expand_range(path: str) -> list[str]:
    """Expand the first range of numbers in braces, as in "shard-{000..127}.tar"."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}", path)
    if not match:
        return [path]
    first, last = int(match[1]), int(match[2])
    if first > last:
        raise ValueError(f"{path!r}: the range {match[0]} is empty: write the lower number first, as {{{last}..{first}}}")
    width = len(match[1])
    names = [f"{path[: match.start()]}{number:0{width}}{path[match.end() :]}" for number in range(first, last + 1)]
    return [each for name in names for each in _expand_range(name)]
