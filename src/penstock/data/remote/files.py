"""List remote files and give the local paths of their copies: `remote`, `local`, and `RemoteSource`, which opens them."""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import math
import os
import queue
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from penstock._bytes import counted, format_bytes, parse_bytes
from penstock.data.remote.cache import Cache, open_cache
from penstock.data.remote.store import RemoteFile, Store
from penstock.data.remote.url import address, is_url, protocol, shown, unsigned
from penstock.data.tree import Batch, Record

_AT_ONCE = 8  # downloads and requests; one connection rarely fills the network
T = TypeVar("T")
R = TypeVar("R")


def remote(
    urls: str | Sequence[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int | float | str = "50GiB",
    timeout: float = 60.0,
) -> RemoteFiles:
    """List files in a store, such as `s3://`, `gs://`, `hf://` or `https://`, that are read through a local cache.

    `ps.Loader`, `ps.jsonl` and all that takes paths also take URLs, and then call this function with its defaults. Call it
    yourself to give credentials, or to choose the cache.

    A file is downloaded completely when it is first needed. It counts as downloaded once all its bytes are on the disk and
    have been checked; nothing else is ever read. Processes that share a cache folder download a file once.

    Args:
      urls: one URL or several, each of one file or a pattern such as "s3://bucket/train/*.parquet". The files of a pattern are
        sorted by name.
      storage_options: arguments for the fsspec filesystem of the protocol, such as credentials and `endpoint_url`. The client's
        own environment variables apply without them.
      cache: folder of the cache; None for the environment variable `PENSTOCK_CACHE`, or "penstock" in the user's cache folder.
      cache_bytes: bytes that the cache may have, as a number or "50GiB". The least recently used files are removed first, and
        never those that a live process uses.
      timeout: seconds without a new byte after which a file is given up, over all attempts.

    Returns:
      The files, with `len`, `urls` and `bytes`. It is given in place of paths.

    Raises:
      FileNotFoundError: a file, its bucket or its host does not exist, or a pattern matches nothing.
      PermissionError: there are no credentials, or they are refused.
      TimeoutError, ConnectionError: the store does not answer.
      ModuleNotFoundError: the client of the protocol is not installed.
      OSError: the cache folder cannot be used.

    Examples:
      >>> import fsspec, tempfile
      >>> fsspec.filesystem("memory").pipe_file("/numbers/a.bin", b"12345")
      >>> files = ps.remote("memory://numbers/*.bin", cache=tempfile.mkdtemp(), cache_bytes="1GiB")
      >>> len(files), files.bytes, files.read_bytes(0)
      (1, 5, b'12345')
    """
    given = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    if not given or not all(map(is_url, given)):
        wrong = next((each for each in given if not is_url(each)), given)
        raise ValueError(f"remote needs URLs such as 's3://bucket/x.parquet', got {wrong!r}: give a local path as it is")
    if nowhere := next((url for url in given if not address(url)), None):
        raise ValueError(f"{nowhere!r} names neither a bucket nor a host: write it as 's3://bucket/x' or 'https://host/x'")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise ValueError(f"timeout={timeout!r}: needs a number of seconds > 0")
    options = dict(storage_options or {})
    limit = parse_bytes(cache_bytes, "cache_bytes")
    folder = open_cache(cache).folder  # before anything is asked over the network
    stores: dict[str, Store] = {}
    for url in given:
        if protocol(url) not in stores:
            stores[protocol(url)] = Store(url, options, timeout)
    listed = in_parallel(lambda url: [(stores[protocol(url)], file) for file in stores[protocol(url)].files(url)], given)
    files = [pair for pairs in listed for pair in pairs]
    _warn_of_files_without_version([file for _, file in files if not file.version])
    return RemoteFiles(files, folder, limit)


def _warn_of_files_without_version(files: Sequence[RemoteFile]) -> None:
    if files:
        more = f" and of {len(files) - 1:,} more" if len(files) > 1 else ""
        warnings.warn(
            f"the server gives neither an ETag nor the time of the last change of {shown(files[0].url)}{more}, so a copy in the "
            "cache may be out of date: it is downloaded again each time that it is opened. Keep the result of ps.remote, or "
            "copy the data to a store with versions",
            stacklevel=3,
        )


def local(
    url: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int | float | str = "50GiB",
    timeout: float = 60.0,
) -> str:
    """Return the local path of a remote file, which is downloaded if the cache does not have it.

    The file stays as long as this process lives. Use it for formats that are opened by path, such as `.npy` and HDF5.

    Args:
      url: the URL of one file. A local path is returned as it is.
      storage_options, cache, cache_bytes, timeout: see `ps.remote`.

    Returns:
      The path of a complete file, to be read only.

    Raises:
      OSError, ModuleNotFoundError: as for `ps.remote`; the file does not fit the cache or its disk.

    Examples:
      >>> import fsspec, io, tempfile
      >>> file = io.BytesIO()
      >>> np.save(file, np.arange(5))
      >>> fsspec.filesystem("memory").pipe_file("/five.npy", file.getvalue())
      >>> tokens = np.load(ps.local("memory://five.npy", cache=tempfile.mkdtemp()), mmap_mode="r")
      >>> ps.Loader({"x": tokens}, batch_size=2)[0]["x"].tolist()
      [0, 1]
    """
    if not is_url(url):
        return os.path.expanduser(os.fspath(url))
    files = remote(url, storage_options=storage_options, cache=cache, cache_bytes=cache_bytes, timeout=timeout)
    if len(files) != 1:
        raise ValueError(
            f"{shown(url)} matches {counted(len(files), 'file')}, and local returns the path of one: use ps.remote(...).paths()"
        )
    return files.paths(keep=True)[0]


class RemoteFiles:
    """Files of a store, as they were listed, and the cache that they are read through. Made by `ps.remote`.

    It may be used by several threads, and pickled.

    Args:
      files: each with the store that it is in.
      folder: the cache.
      limit: bytes that the cache may have.
    """

    def __init__(self, files: Sequence[tuple[Store, RemoteFile]], folder: str, limit: int):
        self._files, self._folder, self._limit = list(files), folder, limit
        self._names = [_cache_name(store, file) for store, file in files]
        self._held: set[str] = set()  # names of the files whose use ends with this object
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_held": set(), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state | {"_lock": threading.Lock()}

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._files)

    def __repr__(self) -> str:
        return f"RemoteFiles({self.describe()}; first {shown(self.urls[0])})"

    @property
    def urls(self) -> list[str]:
        """Return the URLs of the files, with all that they were given with, such as signatures; `names` has none."""
        return [file.url for _, file in self._files]

    @property
    def roots(self) -> list[str]:
        """Return the folder that each file was looked for in: the part of its pattern before the first wildcard."""
        return [file.root for _, file in self._files]

    @property
    def names(self) -> list[str]:
        """Return the URLs for messages, without secrets."""
        return [shown(url) for url in self.urls]

    @property
    def bytes(self) -> int:
        """Return the size of all files together, in bytes."""
        return sum(file.size for _, file in self._files)

    def describe(self) -> str:
        """Return the number of files, their bytes, and a hash of their names, sizes and versions."""
        made_from = repr([(file.name, file.size, file.version) for _, file in self._files])
        version = hashlib.sha256(made_from.encode()).hexdigest()[:12]
        return f"{counted(len(self), 'remote file')} of {counted(self.bytes, 'byte')}, version {version}"

    def paths(self, keep: bool = False) -> list[str]:
        """Return the local paths of all files, after downloading those that the cache does not have.

        The files stay in the cache as long as this object exists.

        Args:
          keep: whether they stay as long as this process lives.

        Raises:
          ValueError: the files do not fit `cache_bytes`.
          OSError: a file cannot be downloaded or does not fit the disk.
        """
        needed = sum({name: file.size for name, (_, file) in zip(self._names, self._files, strict=True)}.values())
        if needed > self._limit:
            files = f"{counted(len(self), 'file')} (first {shown(self.urls[0])}) that are all needed at once"
            raise ValueError(
                f"cache_bytes={format_bytes(self._limit)} is less than {format_bytes(needed)}, the size of {files}. Give "
                f"ps.remote(..., cache_bytes={needed}) and a disk with that space, or read one after the other, with ps.stream"
            )
        stop = threading.Event()
        try:
            return in_parallel(lambda index: self._hold(index, keep, stop), range(len(self)))
        except BaseException:
            stop.set()
            raise

    def _hold(self, index: int, keep: bool, stop: threading.Event) -> str:
        path, name, cache = self._fetch(index, stop), self._names[index], self._cache
        if keep:
            return path
        with self._lock:
            had = name in self._held
            self._held.add(name)
        if had:
            cache.release(name)
        else:
            weakref.finalize(self, cache.release, name).atexit = False
        return path

    @contextmanager
    def using(self, index: int) -> Iterator[str]:
        """Give the local path of one file, which stays in the cache until the end of the `with`."""
        path = self._fetch(index, None)
        try:
            yield path
        finally:
            self._cache.release(self._names[index])

    def prefetch(self, index: int) -> None:
        """Begin to download a file that will soon be used. An error is left to its use."""

        def work() -> None:
            with contextlib.suppress(Exception), self.using(index):
                pass

        threading.Thread(target=work, name="penstock-remote", daemon=True).start()

    def read_bytes(self, index: int) -> builtins.bytes:
        """Return the content of one file, through the cache."""
        name, cache, size = self._names[index], self._cache, self._files[index][1].size
        file = cache.open(name, size)
        if file is None:
            with self.using(index) as path, open(path, "rb") as fetched:
                return fetched.read()
        with file:
            return file.read()

    @property
    def _cache(self) -> Cache:
        return open_cache(self._folder)

    def _fetch(self, index: int, stop: threading.Event | None) -> str:
        store, file = self._files[index]
        return self._cache.fetch(
            self._names[index],
            file.size,
            self._limit,
            lambda out: store.download(file, out, stop),
            patience=2 * store.timeout + 10,
            shown=shown(file.url),
        )


def _cache_name(store: Store, file: RemoteFile) -> str:
    """Return the name of a file in the cache: another one for each address, endpoint, size and version.

    Without a version, a copy cannot be told from a newer file of the same size, so each listing gives another name.
    """
    client = store.options.get("client_kwargs") or {}
    endpoint = store.options.get("endpoint_url") or client.get("endpoint_url") or os.environ.get("AWS_ENDPOINT_URL") or ""
    url = unsigned(file.url) if file.version else file.url
    made_from = repr((url, str(endpoint), file.size, file.version, file.listing))
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", file.name)[-80:]
    return f"{hashlib.sha256(made_from.encode()).hexdigest()[:32]}-{readable}"


def in_parallel(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Call a function for each item on a few daemon threads, and return the results in order.

    The first error is raised without waiting for the calls that are still running.
    """
    if len(items) == 1:
        return [function(items[0])]
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, R | None, BaseException | None]] = queue.SimpleQueue()
    for index in range(len(items)):
        todo.put(index)
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            try:
                index = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((index, function(items[index]), None))
            except BaseException as error:
                done.put((index, None, error))

    for _ in range(min(_AT_ONCE, len(items))):
        threading.Thread(target=work, name="penstock-remote", daemon=True).start()
    results: dict[int, R] = {}
    try:
        while len(results) < len(items):
            index, result, error = done.get()
            if error is not None:
                raise error
            results[index] = result  # type: ignore[assignment]  # without an error, there is a result
    finally:
        ended.set()
    return [results[index] for index in range(len(items))]


class RemoteSource:
    """A source over the local copies of remote files. Their versions are a part of its description.

    Args:
      files: are all downloaded here, and stay in the cache as long as the source exists.
      opener: makes a `Source` of their local paths.
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
