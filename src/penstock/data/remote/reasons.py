"""Find out why a store failed, from the exceptions of its client.

An exception of fsspec, botocore, aiohttp, gcsfs or huggingface_hub goes in. An exception of the operating system's kind comes
out, with the URL, the reason, the attempts and the remedy; and whether another attempt may help.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

from penstock.data.remote.url import protocol, shown

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

    The innermost exceptions know best: fsspec raises FileNotFoundError for each failure of HTTP.
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
    """Return the error for a file or listing that cannot be read.

    Args:
      error: the last failure.
      url: the file or pattern.
      attempts: how often it was tried.
      seconds: for how long.

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
        message = (
            f"cannot read {name} ({said}). {tried}. Check the network, the host and endpoint_url, and run again: files that "
            "are complete in the cache are not downloaded again"
        )
        return _network_error(error, message)
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


def _network_error(error: BaseException, message: str) -> OSError:
    if any(isinstance(each, TimeoutError) or "Timeout" in type(each).__name__ for each in _chain(error)):
        return TimeoutError(message)
    return ConnectionError(message)
