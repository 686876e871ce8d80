"""Checks of the arguments of public functions."""

from __future__ import annotations

import operator
from typing import Any

_LONGEST = 300
"""The most characters of an object in an error."""


def brief(shown: Any) -> str:
    """Return the representation of an object for an error, cut where it is long.

    Args:
      shown: any object.

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
