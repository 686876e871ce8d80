"""Checks of what users pass."""

from __future__ import annotations

import operator
from typing import Any


def at_least(least: int, name: str, value: Any) -> int:
    """The value as an int; ValueError if it is no integer (of Python or NumPy) or less than `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise ValueError(f"{name}={value!r}: needs an integer >= {least}")
    return number
