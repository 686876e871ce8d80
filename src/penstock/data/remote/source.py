"""A source over remote files: `RemoteFiles` and a function that opens local paths go in, a `Source` comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.data.remote.files import RemoteFiles, remote
from penstock.data.remote.url import is_url
from penstock.data.tree import Batch, Record


class RemoteSource:
    """A source over the local copies of remote files. Their versions are a part of its description.

    Args:
      files: the remote files. All are downloaded here, and stay in the cache as long as the source exists.
      opener: makes a `Source` of their local paths.

    Raises:
      ValueError: the files do not fit the cache, or a file is damaged.
      OSError: a file cannot be downloaded.
    """

    def __init__(self, files: RemoteFiles, opener: Callable[[list[str]], Any]):
        self._files = files
        paths = files.paths()
        try:
            self._source = opener(paths)
        except Exception as error:
            for path, name in zip(paths, files.names, strict=True):
                if path in str(error):
                    error.add_note(f"penstock: {path!r} is the copy of {name}, and has all of its bytes")
            raise
        self.is_gather = getattr(self._source, "is_gather", False)

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._source)

    def read(self, indices: np.ndarray) -> Batch | list[Record]:
        """Return the records at int64 [n], as the source of the local files does."""
        return self._source.read(indices)

    def describe(self) -> str:
        """Return the description of the records, and the number, size and version of the files."""
        describe = getattr(self._source, "describe", None)
        return f"{describe() if describe else type(self._source).__name__}; {self._files.describe()}"


def as_remote(paths: Any) -> RemoteFiles | None:
    """Return remote files if `paths` are some, or are URLs; None for local paths."""
    if isinstance(paths, RemoteFiles):
        return paths
    many: Sequence[Any] = paths if isinstance(paths, (list, tuple)) else [paths]
    return remote(paths) if any(map(is_url, many)) else None
