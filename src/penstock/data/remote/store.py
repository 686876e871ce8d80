"""List and read the files of a store through fsspec.

URLs, patterns and storage options go in; `RemoteFile`s with sizes and versions, and their bytes come out.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, BinaryIO

from penstock.data.remote.patience import NoAnswerError, Patience
from penstock.data.remote.reasons import TruncatedError
from penstock.data.remote.url import file_name, fixed_part, is_http, is_pattern, protocol, shown

_SMALLEST_PART, _FIRST_PART, _LARGEST_PART = 1 << 16, 1 << 20, 32 << 20  # bytes of one request to a store other than HTTP
_PART_SECONDS = 2.0  # the wanted duration of one request
_BLOCK, _BLOCK_SECONDS = 1 << 20, 0.5  # the most bytes and time that are gathered before they are written
# Properties that tell versions of a file apart, the most telling first. Times come last: they also change without the content.
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "Digest", "lfs", "blob_id", "generation", "version_id")
_TIMES = ("LastModified", "last_modified", "Last-Modified", "mtime", "updated", "created")


@dataclass(frozen=True)
class RemoteFile:
    """A file in a store, as it was listed.

    Attributes:
      url: its address.
      path: its address as the filesystem of fsspec has it.
      size: bytes.
      version: what the store says to tell versions of the file apart; "" if it says nothing.
      checksum: (algorithm, hexadecimal digest) of the content, if the store gives one.
      root: the address of the folder that the file was looked for in: the part of a pattern before its first wildcard.
      listing: another text for each listing, if the store says nothing of versions; else "".
    """

    url: str = field(repr=False)  # it may have a secret
    path: str = field(repr=False)
    size: int
    version: str
    checksum: tuple[str, str] | None
    root: str = field(repr=False)
    listing: str = ""

    @property
    def name(self) -> str:
        """Return the last part of the address."""
        return file_name(self.url)


class Store:
    """The filesystem of one protocol. It may be used by several threads, pickled, and used after a fork.

    Args:
      url: one of its addresses.
      options: storage options of fsspec.
      timeout: seconds without a new byte after which a file or listing is given up.

    Raises:
      ModuleNotFoundError: fsspec or the client of the protocol is not installed.
      ValueError: fsspec does not know the protocol, or the client refuses an option.
      TimeoutError: the client cannot find its credentials in time.
    """

    def __init__(self, url: str, options: Mapping[str, Any], timeout: float):
        self.protocol, self.options, self.timeout = protocol(url), dict(options), timeout
        self._lock = threading.Lock()
        self._opened: tuple[int, Any] | None = None
        Patience(url, timeout).insist(lambda: self.filesystem)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None, "_opened": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state | {"_lock": threading.Lock()}

    @property
    def filesystem(self) -> Any:
        """Return the filesystem of this process. Those of fsspec do not survive a fork."""
        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():
                self._opened = (os.getpid(), _open(self.protocol, self.options, self.timeout))
            return self._opened[1]

    def files(self, url: str) -> list[RemoteFile]:
        """Return the file at a URL, or the files that a pattern matches, sorted by address.

        Raises:
          FileNotFoundError: there is none.
          IsADirectoryError: the URL is a folder.
          OSError: the store cannot be read.
        """
        self.filesystem.invalidate_cache()  # a listing of before may be out of date
        if not is_pattern(url):
            return [self._info(url, url.partition("?")[0].rpartition("/")[0] if is_http(url) else url.rpartition("/")[0])]
        if not is_http(url) and (file := self._literal(url)):
            return [file]
        found = Patience(url, self.timeout).insist(lambda: list(self._matches(url)))
        if not found:
            raise FileNotFoundError(
                f"no file matches {shown(url)}: what comes before the wildcard is a file, or has no files of such names"
            )
        found.sort(key=lambda info: info["name"])
        root = self.filesystem.unstrip_protocol(fixed_part(self.filesystem._strip_protocol(url)))
        if any(info.get("size") is None for info in found):  # a listing of HTTP is a page of links
            return [self._info(info["name"], root) for info in found]
        return [self._file(self.filesystem.unstrip_protocol(info["name"]), info, root) for info in found]

    def _literal(self, url: str) -> RemoteFile | None:
        """Return the file whose name has the characters of a pattern; None if there is none."""
        try:
            return self._info(url, url.rpartition("/")[0])
        except (ConnectionError, TimeoutError):
            raise
        except Exception:  # the listing finds out what is wrong
            return None

    def _matches(self, url: str) -> Iterator[dict[str, Any]]:
        """Yield the entries that match. `glob` of fsspec would leave out folders that it cannot list, without an error."""
        from fsspec.utils import glob_translate

        fs = self.filesystem
        pattern = fs._strip_protocol(url)
        root = fixed_part(pattern)
        depth = None if "**" in pattern else pattern[len(root) :].strip("/").count("/") + 1
        matches = re.compile(glob_translate(pattern)).match
        for _, _, files in fs.walk(root, maxdepth=depth, on_error="raise", detail=True):
            yield from (info for info in files.values() if _is_file(info) and matches(info["name"]))

    def _info(self, url: str, root: str) -> RemoteFile:
        fs = self.filesystem
        path = fs._strip_protocol(url)
        info = Patience(url, self.timeout).insist(lambda: fs.info(path))
        if info["type"] == "directory":
            raise IsADirectoryError(f"{shown(url)} is a folder: give a pattern such as {shown(url).rstrip('/') + '/*'}")
        return self._file(url, info, root)

    def _file(self, url: str, info: dict[str, Any], root: str) -> RemoteFile:
        if info.get("size") is None:
            raise OSError(
                f"{shown(url)} has no known size, so a download that was cut short could not be told: download it by other "
                "means, and give the local path"
            )
        version = _version(info)
        listing = "" if version else uuid.uuid4().hex
        return RemoteFile(url, info["name"], int(info["size"]), version, _checksum(info), root, listing)

    def download(self, file: RemoteFile, out: BinaryIO, stop: threading.Event | None = None) -> None:
        """Write the content of a file to `out`, and check it.

        Args:
          file: as it was listed.
          out: an empty file that is open for writing.
          stop: set if the file is not wanted any more.

        Raises:
          OSError: the file cannot be read, does not have its checksum, or has changed since it was listed.
        """
        patience = Patience(file.url, self.timeout, stop)
        digest = hashlib.new(file.checksum[0]) if file.checksum else None
        (self._read_stream if self.protocol in ("http", "https") else self._read_parts)(file, out, patience)
        if digest is not None and file.checksum is not None:
            out.seek(0)
            for block in iter(lambda: out.read(1 << 20), b""):
                digest.update(block)
            if digest.hexdigest() != file.checksum[1]:
                raise OSError(
                    f"{shown(file.url)} arrived damaged: its {file.checksum[0]} is {digest.hexdigest()}, and the store says "
                    f"{file.checksum[1]}. Nothing of it is kept: run again"
                )
        self._check_unchanged(file)

    def _check_unchanged(self, file: RemoteFile) -> None:
        self.filesystem.invalidate_cache()
        info = Patience(file.url, self.timeout).insist(lambda: self.filesystem.info(file.path))
        version = _version(info, (file.version.partition("=")[0],))  # a listing may have other properties than this
        if info.get("size") != file.size or version not in ("", file.version):
            raise OSError(
                f"{shown(file.url)} changed after it was listed: it had {file.size:,} bytes and {file.version or 'no version'}, "
                f"and has {info.get('size'):,} bytes and {version or 'no version'}. Open the data set anew"
            )

    def _read_parts(self, file: RemoteFile, out: BinaryIO, patience: Patience) -> None:
        """Request one part after the other. A part that fails is requested again, and a smaller one if it takes too long."""
        at, part = 0, _FIRST_PART
        while at < file.size:
            stop = min(at + part, file.size)
            began = time.monotonic()
            try:
                data = patience.call(partial(self.filesystem.cat_file, file.path, start=at, end=stop))
                if len(data) != stop - at:
                    raise TruncatedError(f"{len(data):,} bytes came of the {stop - at:,} that begin at byte {at:,}")
            except NoAnswerError as error:
                if part <= _SMALLEST_PART:
                    patience.failed(error)
                part = max(part // 4, _SMALLEST_PART)
                patience.progress()  # bytes may come, but too few for a part of this size
                continue
            except Exception as error:
                self._failed(file, error, patience)
                part = min(part, _FIRST_PART)
                continue
            out.write(data)
            patience.progress()
            rate = len(data) / max(time.monotonic() - began, 1e-6)
            part = int(min(max(rate * _PART_SECONDS, _SMALLEST_PART), 2 * part, _LARGEST_PART))
            at = stop

    def _failed(self, file: RemoteFile, error: Exception, patience: Patience) -> None:
        """Sleep before the next attempt, unless another number of bytes came because the file has changed."""
        if isinstance(error, TruncatedError):
            self._check_unchanged(file)
        patience.failed(error)

    def _read_stream(self, file: RemoteFile, out: BinaryIO, patience: Patience) -> None:
        """Read from the beginning to the end. After a failure, continue there, or begin anew if the server gives no parts."""
        for at, block in self._blocks(file, patience):  # which repeats errors of reading, and not those of writing
            out.seek(at)
            out.write(block)

    def _blocks(self, file: RemoteFile, patience: Patience) -> Iterator[tuple[int, bytes]]:
        """Yield each block of the content with the byte that it begins at."""
        at = most = 0
        stream = None
        while at < file.size:
            try:
                if stream is None:
                    stream, at = patience.call(partial(self._open_stream, file, at))
                block = patience.call(partial(_read_some, stream, min(_BLOCK_SECONDS, self.timeout / 4)))
                if not block:
                    raise TruncatedError(f"{at:,} bytes came of {file.size:,}")
            except Exception as error:
                if stream is not None:
                    with contextlib.suppress(Exception):
                        stream.close()
                stream = None
                self._failed(file, error, patience)
                continue
            yield at, block
            at += len(block)
            if at > most:
                patience.progress()
                most = at
        if stream is not None:
            stream.close()

    def _open_stream(self, file: RemoteFile, at: int) -> tuple[Any, int]:
        """Request a file of HTTP from a byte on. Return the answer, and the byte that it begins at."""
        headers = dict(self.filesystem.kwargs.get("headers", {}))
        if at and file.version:  # otherwise the rest could be that of another version
            headers["Range"] = f"bytes={at}-"
        stream = self.filesystem.open(file.path, "rb", block_size=0, size=file.size, headers=headers)
        is_part = stream.r.status == 206 and stream.r.headers.get("Content-Range", "").startswith(f"bytes {at}-")
        return stream, at if is_part else 0


def _is_file(info: dict[str, Any]) -> bool:
    """Return whether an entry is a file, and not the mark of a folder.

    Consoles of S3 mark a folder by an empty object whose name ends with a slash. Pages of HTTP servers have links such as
    "folder/?C=N", which sort them.
    """
    name = info["name"]
    return info["type"] == "file" and not (name.partition("?")[0] if is_http(name) else name).endswith("/")


def _read_some(stream: Any, seconds: float) -> bytes:
    """Return the next bytes of a stream: those that come in a short time, and at least one until its end."""
    until, blocks, left = time.monotonic() + seconds, [stream.read(_BLOCK)], _BLOCK
    with contextlib.suppress(Exception):  # after some bytes, an error is left to the next call, which meets it again
        while blocks[-1] and (left := left - len(blocks[-1])) > 0 and time.monotonic() < until:
            blocks.append(stream.read(left))
    return b"".join(blocks)


def _open(name: str, options: dict[str, Any], timeout: float) -> Any:
    """Open the filesystem of a protocol, with time limits for its connections."""
    try:
        import fsspec

        return fsspec.filesystem(name, **_with_timeouts(name, options, timeout))
    except ImportError as error:
        missing = error.name or str(error)
        raise ModuleNotFoundError(
            f'reading {name}:// needs more packages ({missing}): pip install "penstock[remote]"; protocols that are not in '
            "it have a package of their own, which the documentation of fsspec names",
            name=error.name,
        ) from error
    except ValueError as error:
        error.add_note(f"penstock: while opening {name}:// with the storage options {sorted(options)}")
        raise


def _with_timeouts(name: str, options: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Add limits for connecting and for the wait for bytes to the options, where the caller gives none."""
    connect, read = min(10.0, timeout), min(30.0, timeout)
    if name in ("s3", "s3a"):
        limits = {"connect_timeout": connect, "read_timeout": read, "retries": {"max_attempts": 2}}
        return {**options, "config_kwargs": {**limits, **options.get("config_kwargs", {})}}
    if name in ("http", "https"):
        import aiohttp

        limit = aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=read)
        return {
            **options,
            "client_kwargs": {"timeout": limit, **options.get("client_kwargs", {})},
            "headers": {"Accept-Encoding": "identity", **options.get("headers", {})},
        }
    if name in ("gs", "gcs"):
        return {"requests_timeout": max(read, timeout), **options}
    return options


def _version(info: dict[str, Any], among: tuple[str, ...] = _VERSIONS + _TIMES) -> str:
    """Return the first property that tells versions apart, as "ETag=…"; "" if there is none."""
    for name in among:
        value = info.get(name)
        if isinstance(value, Mapping):
            value = value.get("sha256")
        if isinstance(value, datetime):
            value = value.timestamp()
        if value:
            number = name in _TIMES and re.fullmatch(r"[0-9.]+", str(value))
            return f"{name}={float(value):.3f}" if number else f"{name}={str(value).strip(chr(34))}"
    return ""


def _checksum(info: dict[str, Any]) -> tuple[str, str] | None:
    """Return the checksum that Google Cloud Storage or the Hugging Face Hub give with a listing."""
    lfs = info.get("lfs")
    if isinstance(lfs, Mapping) and lfs.get("sha256"):
        return "sha256", str(lfs["sha256"])
    if isinstance(info.get("md5Hash"), str):
        return "md5", base64.b64decode(info["md5Hash"]).hex()
    return None
