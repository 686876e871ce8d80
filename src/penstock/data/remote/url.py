"""Tell URLs from local paths, take them apart, and show them without secrets."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import PurePath
from typing import Any
from urllib.parse import unquote

_URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.-]*)://|[a-z0-9]+::")
_PATH_OF_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:[/\\\\]")  # longer than the letter of a drive
_WILDCARD = re.compile(r"[*?\[]")
_ESCAPED = re.compile(r"\[([*?\[])\]")  # a wildcard that stands for itself
_HTTP = re.compile(r"(?i)https?://")
_USER = re.compile(r"(?i)\b(?!hf:)([a-z][a-z0-9+.-]*://)[^/\s?#'\"]*@")
_QUERY = re.compile(r"(?i)(https?://[^\s?]*)\?\S*")
_SIGNATURE = re.compile(r"(?i)(X-Amz-|X-Goog-|Signature=|Expires=|AWSAccessKeyId=|GoogleAccessId=|Key-Pair-Id=|Policy=)")


def is_url(path: Any) -> bool:
    """Return whether a path is a URL such as "s3://bucket/file".

    Raises:
      ValueError: it is a URL that `pathlib` has changed.
    """
    if isinstance(path, PurePath) and _PATH_OF_URL.match(str(path)):
        raise ValueError(f"{path!r}: pathlib has removed a slash of this URL: give it as text, such as 's3://bucket/x'")
    return isinstance(path, str) and _URL.match(path) is not None


def protocol(url: str) -> str:
    """Return the protocol of a URL: "s3" for "s3://bucket/file"."""
    return url.partition("::")[0] if "::" in url.partition("://")[0] else url.partition("://")[0].lower()


def is_http(url: str) -> bool:
    """Return whether a URL is one of HTTP, where a question mark begins the query and names have percent escapes."""
    return _HTTP.search(url) is not None


def is_pattern(url: str) -> bool:
    """Return whether a URL has to be matched with a listing. In HTTP, only a star makes a pattern."""
    if is_http(url):
        return "*" in url.partition("?")[0]
    return _WILDCARD.search(url) is not None


def fixed_part(pattern: str) -> str:
    """Return the folder of a pattern before its first wildcard.

    >>> fixed_part("bucket/train/*/[0-9].jpg")
    'bucket/train'
    >>> fixed_part(escape("bucket/a[1]") + "/**")
    'bucket/a[1]'
    """
    if is_http(pattern):
        pattern = pattern.partition("?")[0]
    folders = pattern.split("/")[:-1]
    fixed = takewhile(lambda folder: not _WILDCARD.search(_ESCAPED.sub("", folder)), folders)
    return _ESCAPED.sub(r"\1", "/".join(fixed))


def escape(folder: str) -> str:
    """Return the pattern that matches a folder of this name."""
    return _WILDCARD.sub(r"[\g<0>]", folder)


def shown(text: str) -> str:
    """Return a URL, or a text with URLs, for messages: without users, passwords, and the queries of HTTP, which sign it.

    >>> shown("https://me:secret@host/x.parquet?Signature=1")
    'https://host/x.parquet?…'
    """
    return _QUERY.sub(r"\1?…", _USER.sub(r"\1", text))


def address(url: str) -> str:
    """Return the address of a file in a store: without protocol, query, percent escapes and outer slashes.

    >>> address("https://host/data/my%20cat.jpg?download=1")
    'host/data/my cat.jpg'
    """
    path = unquote(url.partition("?")[0]) if is_http(url) else url
    return path.rpartition("://")[2].strip("/")


def unsigned(url: str) -> str:
    """Return a URL without the parameters that sign it for a while.

    >>> unsigned("https://bucket.s3.amazonaws.com/x?versionId=1&X-Amz-Date=2&X-Amz-Signature=3")
    'https://bucket.s3.amazonaws.com/x?versionId=1'
    """
    start, _, query = url.partition("?")
    if not query or not is_http(url):
        return url
    kept = "&".join(parameter for parameter in query.split("&") if not _SIGNATURE.match(parameter))
    return f"{start}?{kept}" if kept else start


def file_name(url: str) -> str:
    """Return the last part of a URL, without the query of HTTP.

    >>> file_name("https://host/data/x.parquet?download=1")
    'x.parquet'
    """
    path = url.partition("?")[0] if is_http(url) else url
    return path.rstrip("/").rpartition("/")[2]
