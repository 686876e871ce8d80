"""Check the arguments of public functions, and write them in errors."""

from __future__ import annotations

import operator
import os
from pathlib import Path
from typing import Any

_LONGEST = 300  # the most characters of an object in an error


def brief(shown: Any) -> str:
    """Return the representation of an object for an error, cut where it is long.

    >>> brief([1, 2])
    '[1, 2]'
    """
    text = repr(shown)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


def at_least(least: int, name: str, value: Any) -> int:
    """Return a value as an int.

    Raises:
      ValueError: it is not an integer (of Python or NumPy), or it is less than `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise ValueError(f"{name}={value!r}: needs an integer >= {least}")
    return number


def check_path(name: str, value: Any) -> Path:
    """Return a value as a path, with the folder of the user in place of "~".

    Raises:
      TypeError: it is not a path.
      ValueError: it is empty, has a NUL character, or is the address of a bucket.
    """
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise TypeError(f"{name}={value!r}: needs a path")
    text = os.fspath(value)
    if not text:
        raise ValueError(f"{name}='' is empty: name a path")
    if "\0" in text:
        raise ValueError(f"{name}={text!r} has a NUL character, which no path may have")
    if "://" in text:
        raise ValueError(f"{name}={text!r}: needs a path on a file system: mount the bucket, and name its folder")
    return Path(text).expanduser()


def check_seconds(name: str, value: Any) -> None:
    """Raise ValueError if a value is not a number of seconds above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{name}={value!r}: needs seconds > 0")
