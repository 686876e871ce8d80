"""Map values to positions on a plot, and choose the ticks of its axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

_CHARACTER = 7.5  # the width of one, at most
_LEAST = 1e-200  # a smaller value leaves floats no room for a margin
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """A map from values in [low, high] to positions in [left, right]."""

    low: float
    high: float
    left: float
    right: float
    log: bool

    def at(self, value: float) -> float:
        """Return the position of a value; a value beyond an end of the axis is put at that end."""
        if value <= self.low:
            return self.left
        if value >= self.high:
            return self.right
        low, high, here = map(self._scaled, (self.low, self.high, value))
        return round(self.left + (self.right - self.left) * (here - low) / (high - low), 1)

    def ticks(self) -> list[float]:
        """Return as many round values as fit without overlap. On a log axis that contains 1, 1 is one of them."""
        found: list[float] = []
        for choice in self._choices():
            found = choice or found
            if len(choice) > 1 and self._has_room_for(choice):
                break
        return found

    def _choices(self) -> Iterator[list[float]]:
        """Yield choices of ticks, from many ticks to few."""
        decades = math.log10(self.high) - math.log10(self.low) if self.log else 0.0
        if decades < 0.45:
            yield from map(self._even, (8, 5, 3, 2))
            return
        for mantissas in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3)):
            if decades < 4:
                yield self._powers(1, mantissas)
        for apart in range(1, math.ceil(decades) + 1):
            yield self._powers(apart, (1,))

    def _even(self, parts: int) -> list[float]:
        rough = (self.high - self.low) / parts
        power = _power(math.floor(math.log10(rough)))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
        return [k * step for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]

    def _powers(self, apart: int, mantissas: Sequence[int]) -> list[float]:
        """Return multiples of every n-th power of ten, where n is `apart`."""
        first, last = math.floor(math.log10(self.low) / apart), math.floor(math.log10(self.high) / apart)
        values = (mantissa * _power(apart * k) for k, mantissa in product(range(first, last + 1), mantissas))
        return [value for value in values if self.low <= value <= self.high]

    def _has_room_for(self, ticks: Sequence[float]) -> bool:
        width = _CHARACTER * (2 + max(len(tick_text(tick, ticks)) for tick in ticks))
        return all(self.at(after) - self.at(before) >= width for before, after in pairwise(ticks))

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.log else value


def ratio_axis(ratios: Iterable[float], bounds: Iterable[float], left: float, right: float) -> Axis:
    """Return a log axis that contains 1, all ratios but 0, and the intervals' bounds unless they are very far away.

    The axis extends beyond the ratios by at most their span, or by a decade. A longer interval would compress all others.
    """
    points = [0.0, *(_log(ratio) for ratio in ratios if ratio > 0)]
    reach = max(max(points) - min(points), math.log(10))
    lowest, highest = min(points) - reach, max(points) + reach
    ends = points + [min(max(_log(bound), lowest), highest) for bound in bounds]
    margin = max(0.06 * (max(ends) - min(ends)), math.log(1.004))
    return Axis(math.exp(min(ends) - margin), math.exp(max(ends) + margin), left, right, log=True)


def value_axis(values: Sequence[float], left: float, right: float) -> Axis:
    """Return an axis that contains all values: a log axis if the largest is more than three times the smallest."""
    low, high = min(values), max(values)
    if low > _LEAST and high > 3 * low:
        margin = math.exp(0.03 * (math.log(high) - math.log(low)))
        return Axis(low / margin, high * margin, left, right, log=True)
    margin = max(0.03 * (high - low), 5e-4 * max(abs(low), abs(high)))
    if margin < _LEAST:
        margin = 1.0
    return Axis(low - margin, high + margin, left, right, log=False)


def tick_text(value: float, ticks: Sequence[float]) -> str:
    """Format a tick's value with as many decimals as the ticks need; write very large and small powers of ten as 10ⁿ."""
    exponent = round(math.log10(value)) if value > 0 else 0
    if abs(exponent) > 4 and math.isclose(value, _power(exponent)):
        return "10" + str(exponent).translate(_SUPERSCRIPTS)
    gaps = [later - earlier for earlier, later in pairwise(ticks)]
    if 1e-4 <= abs(value) < 1e6 and gaps and math.isclose(min(gaps), max(gaps), rel_tol=1e-3):
        return f"{value:,.{max(0, -math.floor(math.log10(gaps[0]) + 1e-9))}f}"
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:.4g}"


def _log(ratio: float) -> float:
    """Return the logarithm, limited so that there is room for a margin."""
    return min(max(math.log(ratio), -600.0), 600.0) if ratio > 0 else -600.0


def _power(exponent: int) -> float:
    """Return the float that is closest to a power of ten."""
    return float(f"1e{exponent}")
