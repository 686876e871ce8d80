"""Draw the common parts of all plots: the frame, names at the left, and an axis below.

The SVG is written by hand, not by Matplotlib. Matplotlib's SVG has inline styles, which the page's content security policy
forbids and dark mode cannot change. It is four times as long. We would still have to write the ticks of a log axis and the
columns of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from penstock.page import Content, Markup, tag
from penstock_bench.page._axis import Axis, tick_text

WIDTH = 580.0
TOP = 10.0
_LINE = 15.0
_AXIS_HEIGHT = 46.0
_COLUMN = 24  # characters of a name in one line
_CHARACTER = 6.9  # the width of one, in the widest of the usual fonts


def svg(kind: str, title: str, height: float, *content: Content) -> Markup:
    """Return an SVG image of these elements, which scales with the page. Screen readers read its title."""
    return tag(
        "svg",
        tag("title", title),
        content,
        class_=f"plot {kind}",
        role="img",
        aria_label=title,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        xmlns="http://www.w3.org/2000/svg",
    )


def text(x: float, y: float, words: str, class_: str, anchor: str = "start", room: float = math.inf) -> Markup:
    """Write text at a position; compress it if it is wider than `room`."""
    tight = len(words) * _CHARACTER > room
    return tag(
        "text",
        words,
        class_=class_,
        x=x,
        y=y,
        text_anchor=anchor,
        textLength=room if tight else None,
        lengthAdjust="spacingAndGlyphs" if tight else None,
    )


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return tag("line", class_=class_, x1=x1, y1=y1, x2=x2, y2=y2)


def name(words: str, y: float, small: str | None = None) -> Markup:
    """Write a row's name in at most two lines that are centred on y, and a smaller line below."""
    first, second = _folded(words)
    lines = [part for part in (first, second) if part]
    top = y + 4 - _LINE / 2 * (len(lines) + bool(small) - 1)
    written = [text(0, top + _LINE * row, part, "name") for row, part in enumerate(lines)]
    return tag("g", written, small and text(0, top + _LINE * len(lines), small, "small"))


def left_of(names: Iterable[str]) -> float:
    """Return the x position at which the plot begins, right of the names."""
    longest = max(len(part) for words in names for part in _folded(words))
    return round(_CHARACTER * max(longest, 16)) + 16.0


def height_below(y: float) -> float:
    """Return the height of an image whose rows end at y."""
    return y + _AXIS_HEIGHT


def axis(scale: Axis, y: float, left: str, right: str, middle: str = "", suffix: str = "") -> Markup:
    """Draw an axis at y: grid lines above it, tick values below it, and labels for its left end, middle and right end."""
    ticks = scale.ticks()
    return tag(
        "g",
        [line(scale.at(tick), TOP, scale.at(tick), y, "grid") for tick in ticks],
        line(scale.left, y, scale.right, y, "rule"),
        [text(scale.at(tick), y + 16, tick_text(tick, ticks) + suffix, "tick", "middle") for tick in ticks],
        left and text(scale.left, y + 36, left, "small"),
        middle and text((scale.left + scale.right) / 2, y + 36, middle, "small", "middle"),
        right and text(scale.right, y + 36, right, "small", "end"),
        aria_hidden="true",
    )


def path(points: Sequence[tuple[float, float]], class_: str) -> Markup:
    """Draw a filled polygon."""
    return tag("path", class_=class_, d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + "Z")


def _folded(words: str) -> tuple[str, str]:
    """Wrap a name into two lines; end the second with "…" if it is too long."""
    if len(words) <= _COLUMN:
        return words, ""
    space = words.rfind(" ", _COLUMN // 3, _COLUMN + 1)
    cut = space if space > 0 else _COLUMN
    rest = words[cut:].strip()
    return words[:cut], rest if len(rest) <= _COLUMN else rest[: _COLUMN - 1] + "…"
