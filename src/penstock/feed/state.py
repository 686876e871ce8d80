"""The saved state of a feed: a state and the fingerprint of a source go in; an error comes out if they do not belong together."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from typing import Any

STATE_VERSION = 1

_LONG, _AROUND = 100, 30  # characters of a value that is shortened, and of what is equal that is kept around a difference


def check_state(state: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> None:
    """Raise ValueError if a state is not one of a feed, or does not belong to this source."""
    if not _is_state(state):
        raise ValueError(f"not a state of a feed (version {STATE_VERSION}): {str(state)[:200]}")
    saved = state["of"]
    differing = [name for name in {**saved, **fingerprint} if saved.get(name) != fingerprint.get(name)]
    if differing:
        listed = "; ".join(_difference(name, saved.get(name), fingerprint.get(name)) for name in differing)
        raise ValueError(f"the state belongs to something else: {listed}. Step {state['step']} would hold other records")


def _is_state(state: Any) -> bool:
    if not isinstance(state, Mapping) or state.get("version") != STATE_VERSION or not isinstance(state.get("of"), Mapping):
        return False
    step = state.get("step")
    return isinstance(step, int) and not isinstance(step, bool) and step >= 0


def _difference(name: str, was: Any, now: Any) -> str:
    """Describe two values that differ. Long ones are cut to where they differ."""
    one, other = repr(was), repr(now)
    if max(len(one), len(other)) > _LONG:
        same = _common(one, other)
        same_end = _common(one[same:][::-1], other[same:][::-1])
        one, other = _cut(one, same, same_end), _cut(other, same, same_end)
    return f"{name} was {one} and is {other}"


def _common(one: str, other: str) -> int:
    """Count the characters at the beginning of two texts that are the same."""
    return sum(1 for _ in itertools.takewhile(bool, map(operator.eq, one, other)))


def _cut(text: str, same: int, same_end: int) -> str:
    """Cut a text to its beginning, the part after `same` and before the last `same_end` characters, and words around that."""
    begin, end = same - _AROUND, max(len(text) - same_end, same) + _AROUND
    begin = 0 if begin < _AROUND else text.rfind(" ", _AROUND, begin) + 1 or begin
    end = len(text) if end > len(text) else text.find(" ", end)
    middle = text[begin:] if end < 0 else text[begin:end]
    if len(middle) > 2 * _LONG:
        middle = f"{middle[:_LONG]} … {middle[-_AROUND:]}"
    return f"{text[:_AROUND]} … " * (begin > 0) + middle + " …" * (0 <= end < len(text))
