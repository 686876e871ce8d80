"""List and read the files of a store through fsspec, and explain why that failed.

`Store` lists files with sizes and versions, and downloads them. `Patience` repeats an attempt that failed for a passing reason,
with exponential backoff, within a time limit. `explain` replaces an exception of fsspec, botocore, aiohttp, gcsfs or
huggingface_hub by an OSError with the URL, the reason, the attempts and the remedy.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import queue
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, BinaryIO, TypeVar

from penstock.data.remote.url import file_name, fixed_part, is_http, is_pattern, protocol, shown

T = TypeVar("T")

_SMALLEST_PART, _FIRST_PART, _LARGEST_PART = 1 << 16, 1 << 20, 32 << 20  # bytes of one request to a store other than HTTP
_PART_SECONDS = 2.0  # the wanted duration of one request
_BLOCK, _BLOCK_SECONDS = 1 << 20, 0.5  # the most bytes and time that are gathered before they are written
# Properties that tell versions of a file apart, the most telling first. Times come last: they also change without the content.
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "Digest", "lfs", "blob_id", "generation", "version_id")
_TIMES = ("LastModified", "last_modified", "Last-Modified", "mtime", "updated", "created")


@dataclass(frozen=True)
class RemoteFile:
    """A file in a store, as it was listed. Its addresses may have secrets, and are not printed."""

    url: str = field(repr=False)
    path: str = field(repr=False)  # its address as the filesystem of fsspec has it
    size: int  # bytes
    version: str  # differs between versions of the file, such as an ETag; "" if the store gives none
    checksum: tuple[str, str] | None  # (algorithm, hexadecimal digest) of the content, if the store gives one
    root: str = field(repr=False)  # the folder that was listed: the part of a pattern before its first wildcard
    listing: str = ""  # another text for each listing, if the store gives no versions

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
        """Return the filesystem of this process. A filesystem of fsspec does not survive a fork."""
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
        except Exception:  # the listing raises the error
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
        for at, block in self._blocks(file, patience):  # which repeats errors of reading, and not of writing
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
        if at and file.version:  # otherwise the rest could come from another version
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


# Attempts.

ATTEMPTS = 6  # in a row without a new byte; with their pauses, these take 8 seconds
_FIRST_PAUSE = 0.25  # seconds; the pauses double


class NoAnswerError(TimeoutError):
    """An error for a call that had no result in time, though its client may still wait for one."""


class Patience:
    """The attempts that are left to read one file or listing.

    Args:
      url: for errors.
      timeout: seconds without progress after which it is given up, over all attempts.
      stop: set if the result is not wanted any more.
    """

    def __init__(self, url: str, timeout: float, stop: threading.Event | None = None):
        self._url, self._timeout = url, timeout
        self._stop = stop or threading.Event()
        self._began = time.monotonic()
        self._last: Exception | None = None
        self.progress()

    def progress(self) -> None:
        """Begin to count anew, after new bytes."""
        self._attempts, self._since = 0, time.monotonic()

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on a thread, and wait for it as long as there is time.

        A client may wait for a dead connection for ever, and Python cannot interrupt that. Such a thread is left behind.

        Raises:
          NoAnswerError: there is no result in time.
          ConnectionAbortedError: the result is not wanted any more.
        """
        if self._stop.is_set():
            raise ConnectionAbortedError("given up, because another file failed")
        results: queue.SimpleQueue[tuple[bool, T | BaseException]] = queue.SimpleQueue()

        def work() -> None:
            try:
                results.put((True, function()))
            except BaseException as error:
                results.put((False, error))

        threading.Thread(target=work, name="penstock-remote", daemon=True).start()
        try:
            done, result = results.get(timeout=max(0.01, self._since + self._timeout - time.monotonic()))
        except queue.Empty:
            before = f"; the attempt before it failed with {reason(self._last)}" if self._last else ""
            raise NoAnswerError(f"no answer within timeout={self._timeout:g} s{before}") from None
        if done:
            return result  # type: ignore[return-value]  # `done` tells which of the two it is
        raise result  # type: ignore[misc]  # likewise

    def failed(self, error: Exception) -> None:
        """Sleep before the next attempt. Raise an error if the reason does not pass, or no time or attempt is left."""
        self._attempts += 1
        self._last = error
        pause = _FIRST_PAUSE * 2 ** (self._attempts - 1)
        late = time.monotonic() + pause > self._since + self._timeout
        if not passes(error) or self._attempts >= ATTEMPTS or late or self._stop.is_set():
            explained = explain(error, self._url, self._attempts, time.monotonic() - self._began)
            # The causes of a client have the URL in them, with its secrets.
            raise explained from (None if explained is error or shown(self._url) != self._url else error)
        self._stop.wait(pause)

    def insist(self, function: Callable[[], T]) -> T:
        """Call a function until it succeeds, or `failed` raises an error."""
        while True:
            try:
                return self.call(function)
            except Exception as error:
                self.failed(error)


# Reasons of failures.

_CREDENTIALS = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE), or give "
    "storage_options={'key': …, 'secret': …}; {'anon': True} reads a public bucket",
    "gs": "Run `gcloud auth application-default login`, set GOOGLE_APPLICATION_CREDENTIALS, or give "
    "storage_options={'token': …}; {'token': 'anon'} reads a public bucket",
    "hf": "Run `hf auth login`, set HF_TOKEN, or give storage_options={'token': …}. For a gated data set, accept its terms",
    "http": "Give storage_options={'headers': {'Authorization': …}}, or a URL that is signed and not expired",
}
_PASSING_MODULES = ("aiohttp", "httpx", "httpcore", "requests", "urllib3", "urllib", "http", "asyncio", "ssl")
_NETWORK_NAMES = ("Connect", "Timeout", "HTTPClientError", "ResponseStreaming", "TransportError", "Closed")
_CREDENTIAL_NAMES = ("Credential", "ProfileNotFound", "RefreshError", "GatedRepo", "TokenRetrieval", "Unauthorized")
_TRUNCATION_NAMES = ("Truncated", "PayloadError", "ContentLengthError", "TransferEncodingError", "IncompleteRead")
_MISSING = (404, 410)
_DENIED = (401, 403)


class TruncatedError(OSError):
    """A download that ended before all bytes came."""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that caused it."""
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        seen.append(following)
        yield following
        following = following.__cause__ or following.__context__


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an exception of a client carries."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # of botocore
        value = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif hasattr(error, "status"):  # of aiohttp, which warns of `code`
        value = error.status
    else:
        value = getattr(response, "status_code", None) or getattr(error, "code", None)
    return value if isinstance(value, int) and 300 <= value < 600 else None


def _kind(error: BaseException) -> tuple[str, BaseException]:
    """Return "missing", "denied", "passing", "option", "circle" or "other", and the exception of the chain that says so.

    The innermost exceptions are the most exact: fsspec raises FileNotFoundError for each failure of HTTP.
    """
    chain = list(_chain(error))
    for each in chain:
        if any(name in type(each).__name__ for name in _CREDENTIAL_NAMES):
            return "denied", each
    for each in chain:
        if any(name in type(each).__name__ for name in _TRUNCATION_NAMES):  # aiohttp gives these the status 400
            return "passing", each
    for each in chain:
        if isinstance(each, TypeError) and "keyword argument" in str(each):
            return "option", each
        if "TooManyRedirects" in type(each).__name__:  # it has a status too
            return "circle", each
    for each in chain:
        status = _status(each)
        if status is not None:
            known = "missing" if status in _MISSING else "denied" if status in _DENIED else "other"
            return "passing" if status in (408, 425, 429) or status >= 500 else known, each
    for each in reversed(chain):
        if isinstance(each, (TimeoutError, ConnectionError, socket.gaierror)):
            return "passing", each
        if any(name in type(each).__name__ for name in _NETWORK_NAMES):
            return "passing", each
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return "missing", error
    if isinstance(error, PermissionError):
        return "denied", error
    if type(error).__module__.partition(".")[0] in _PASSING_MODULES or type(error) is OSError:
        return "passing", error
    return "other", error


def passes(error: BaseException) -> bool:
    """Return whether another attempt may succeed: after a lost connection, a timeout, or an overloaded server."""
    return _kind(error)[0] == "passing"


def reason(error: BaseException, url: str = "") -> str:
    """Return the kind, the status and the text of an error, without secrets, on one line."""
    status = _status(error)
    text = shown(" ".join(str(error).split()))[:300]
    name = "TimeoutError" if isinstance(error, TimeoutError) else type(error).__name__
    return f"{name}{f' {status}' if status else ''}{f': {text}' if text and text != shown(url) else ''}"


def explain(error: Exception, url: str, attempts: int, seconds: float) -> Exception:
    """Return the error for a file or listing that cannot be read after some attempts, of which `error` is the last failure.

    Returns:
      FileNotFoundError, PermissionError, TimeoutError, ConnectionError or OSError; a TypeError for an unknown storage option.
      An error of another kind is returned with a note, if it has no secrets in it.
    """
    kind, cause = _kind(error)
    said = reason(cause, url)
    tried = f"Tried {'once' if attempts == 1 else f'{attempts} times'} in {seconds:.1f} s"
    name = shown(url)
    family = {"gcs": "gs", "https": "http", "s3a": "s3"}.get(protocol(url), protocol(url))
    if kind == "missing":
        return FileNotFoundError(f"{name} does not exist ({said}). {tried}. Check the bucket or host, the path, and endpoint_url")
    if kind == "denied":
        remedy = _CREDENTIALS.get(family, "Give credentials in storage_options")
        return PermissionError(f"access to {name} was denied ({said}). {tried}. {remedy}")
    if kind == "passing":
        late = any(isinstance(each, TimeoutError) or "Timeout" in type(each).__name__ for each in _chain(error))
        return (TimeoutError if late else ConnectionError)(
            f"cannot read {name} ({said}). {tried}. Check the network, the host and endpoint_url, and run again: files that "
            "are complete in the cache are not downloaded again"
        )
    if kind == "circle":
        return OSError(
            f"cannot read {name} ({said}): the server redirects in a circle. {tried}. Open it in a browser: it may need a "
            "login or a cookie; give the address where the redirects end"
        )
    if kind == "option":
        return TypeError(f"the client of {name} refuses one of storage_options ({said}): remove it, or correct its name")
    if isinstance(error, OSError) or shown(str(error)) != str(error):
        return OSError(f"cannot read {name} ({said}). {tried}")
    error.add_note(f"penstock: while reading {name}. {tried}")
    return error
