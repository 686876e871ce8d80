"""Checks of the arguments of public functions."""

from __future__ import annotations

import operator
from typing import Any


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
