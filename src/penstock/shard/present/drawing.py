"""Layouts as pictures: the array as a rectangle, and along its sides a ruler for each mesh axis that divides it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from penstock.page import Markup, tag
from penstock.shard.apply.sharding_constraints import Spec

_WIDTH, _HEIGHT, _FLAT = 64.0, 40.0, 12.0  # of the array's rectangle; of one with a single dimension
_RULER, _GAP = 5.0, 2.0
_LETTER, _LINE = 6.0, 11.0  # a character's width and a line's height, of the smallest text
_MOST = 16  # parts that can be told apart


def layout_drawing(shape: Sequence[int], layout: Spec, mesh: dict[str, int]) -> Markup:
    """An array as the devices divide it; what device 0 holds is filled.

    Two dimensions are shown, downwards and to the right: the last ones that are sharded, or the last ones. Of a dimension in more
    than 16 parts, 16 are drawn; the text alternative has all.

    Args:
      shape: of the whole array.
      layout: mesh axes of each dimension.
      mesh: sizes of the axes. The first is drawn in the colour of the class "axis-0", and so on.
    """
    down, right = _shown(shape, layout)
    rows, columns = (layout[dim] if dim is not None else () for dim in (down, right))
    left = max((_LETTER * len(axis) + _GAP for axis in rows), default=0.0) + (_RULER + _GAP) * len(rows)
    top = (_LINE + _GAP if columns else 0.0) + (_RULER + _GAP) * len(columns)
    names = _LETTER * len(" ".join(columns))
    height = _FLAT if down is None else _HEIGHT
    width = max(left + _WIDTH, left + names) + 1
    tall = max(top + height, top + _LINE * len(rows)) + 1
    words = layout_words(shape, layout, mesh)
    return tag(
        "svg",
        tag("title", words),
        _rulers(columns, mesh, left, top, _WIDTH, turned=False),
        _names_above(columns, mesh, left),
        _rulers(rows, mesh, top, left, height, turned=True),
        [tag("text", axis, x=0, y=top + _LINE * number + 9, class_=_class(axis, mesh)) for number, axis in enumerate(rows)],
        tag("rect", x=left, y=top, width=_WIDTH, height=height, class_="array"),
        tag(
            "rect",
            x=left,
            y=top,
            width=_WIDTH / min(_parts(columns, mesh), _MOST),
            height=height / min(_parts(rows, mesh), _MOST),
            class_="part",
        ),
        class_="layout",
        role="img",
        aria_label=words,
        viewBox=f"0 0 {width:g} {tall:g}",
        width=f"{width:g}",
        height=f"{tall:g}",
        xmlns="http://www.w3.org/2000/svg",
    )


def layout_words(shape: Sequence[int], layout: Spec, mesh: dict[str, int]) -> str:
    """The text alternative.

    >>> layout_words([512, 64], (("data", "model"), ()), {"data": 2, "model": 4})
    '512 × 64; dimension 0 in 8 parts over data and model'
    >>> layout_words([], (), {"data": 2})
    'a scalar, whole on every device'
    """
    size = " × ".join(map(str, shape)) or "a scalar"
    divided = [
        f"dimension {dim} in {_parts(axes, mesh)} parts over {' and '.join(axes)}" for dim, axes in enumerate(layout) if axes
    ]
    return "; ".join([size, *divided]) if divided else f"{size}, whole on every device"


def _shown(shape: Sequence[int], layout: Spec) -> tuple[int | None, int | None]:
    """The dimensions that are drawn downwards and to the right."""
    sharded = [dim for dim, axes in enumerate(layout) if axes]
    others = [dim for dim in reversed(range(len(shape))) if dim not in sharded]
    chosen = sorted([*sharded[-2:], *others][:2])
    return (chosen[-2] if len(chosen) > 1 else None, chosen[-1] if chosen else None)


def _rulers(
    axes: Sequence[str], mesh: dict[str, int], start: float, edge: float, length: float, turned: bool
) -> Iterator[Markup]:
    """A ruler for each axis that divides a side, the outermost first: every other part of it is filled."""
    for number, axis in enumerate(axes):
        parts = min(_parts(axes[: number + 1], mesh), _MOST)
        at = edge - (_RULER + _GAP) * (len(axes) - number)
        for part in range(parts):
            along, across = ("y", "x") if turned else ("x", "y")
            long, thick = ("height", "width") if turned else ("width", "height")
            where = {along: round(start + length * part / parts, 2), across: at, long: round(length / parts, 2), thick: _RULER}
            yield tag("rect", class_=f"{_class(axis, mesh)} {'odd' if part % 2 else 'even'}", **where)


def _names_above(axes: Sequence[str], mesh: dict[str, int], left: float) -> Iterator[Markup]:
    for number, axis in enumerate(axes):
        before = _LETTER * len(" ".join(("", *axes[:number])))
        yield tag("text", axis, x=round(left + before, 2), y=9, class_=_class(axis, mesh))


def _class(axis: str, mesh: dict[str, int]) -> str:
    return f"axis-{list(mesh).index(axis)}"


def _parts(axes: Sequence[str], mesh: dict[str, int]) -> int:
    return math.prod(mesh[axis] for axis in axes)
