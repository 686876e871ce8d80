"""Draw the layout of an array as SVG.

In: a shape, a layout and a mesh. Out: a rectangle for the array, with a ruler along its side for each mesh axis that shards it,
and a text alternative.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from penstock.page import Markup, tag
from penstock.shard.apply.sharding_constraints import Spec

_WIDTH, _HEIGHT, _FLAT = 64.0, 40.0, 12.0  # the rectangle of the array; its height if the array has one dimension
_RULER, _GAP = 5.0, 2.0
_LETTER, _LINE = 6.0, 11.0  # width of a character and height of a line, in the smallest text
_MOST = 16  # the most parts that a reader can distinguish


def layout_drawing(shape: Sequence[int], layout: Spec, mesh: dict[str, int]) -> Markup:
    """Draw how the devices divide an array. The part of device 0 is filled.

    Two dimensions are drawn, downwards and to the right: the last two that are sharded, or else the last two. At most 16 parts
    of a dimension are drawn; the text alternative gives the true number.

    Args:
      shape: shape of the global array.
      layout: the mesh axes of each dimension.
      mesh: sizes of the mesh axes. The first has the colour of the class "axis-0", and so on.

    Returns:
      An SVG element.
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
    """Describe a layout in words, as the text alternative of its drawing.

    Args:
      shape: shape of the global array.
      layout: the mesh axes of each dimension.
      mesh: sizes of the mesh axes.

    >>> layout_words([512, 64], (("data", "model"), ()), {"data": 2, "model": 4})
    '512 × 64; dimension 0 in 8 parts over data and model'
    >>> layout_words([], (), {"data": 2})
    'a scalar, replicated'
    """
    size = " × ".join(map(str, shape)) or "a scalar"
    divided = [
        f"dimension {dim} in {_parts(axes, mesh)} parts over {' and '.join(axes)}" for dim, axes in enumerate(layout) if axes
    ]
    return "; ".join([size, *divided]) if divided else f"{size}, replicated"


def _shown(shape: Sequence[int], layout: Spec) -> tuple[int | None, int | None]:
    """Return the dimensions to draw downwards and to the right; None if the array has too few."""
    sharded = [dim for dim, axes in enumerate(layout) if axes]
    others = [dim for dim in reversed(range(len(shape))) if dim not in sharded]
    chosen = sorted([*sharded[-2:], *others][:2])
    return (chosen[-2] if len(chosen) > 1 else None, chosen[-1] if chosen else None)


def _rulers(
    axes: Sequence[str], mesh: dict[str, int], start: float, edge: float, length: float, turned: bool
) -> Iterator[Markup]:
    """Draw a ruler for each mesh axis that shards a dimension, the major one outermost; every other part is filled."""
    for number, axis in enumerate(axes):
        parts = min(_parts(axes[: number + 1], mesh), _MOST)
        at = edge - (_RULER + _GAP) * (len(axes) - number)
        for part in range(parts):
            along, across = ("y", "x") if turned else ("x", "y")
            long, thick = ("height", "width") if turned else ("width", "height")
            where = {along: round(start + length * part / parts, 2), across: at, long: round(length / parts, 2), thick: _RULER}
            yield tag("rect", class_=f"{_class(axis, mesh)} {'odd' if part % 2 else 'even'}", **where)


def _names_above(axes: Sequence[str], mesh: dict[str, int], left: float) -> Iterator[Markup]:
    """Draw the names of the mesh axes above the array."""
    for number, axis in enumerate(axes):
        before = _LETTER * len(" ".join(("", *axes[:number])))
        yield tag("text", axis, x=round(left + before, 2), y=9, class_=_class(axis, mesh))


def _class(axis: str, mesh: dict[str, int]) -> str:
    """Return the CSS class with the colour of a mesh axis."""
    return f"axis-{list(mesh).index(axis)}"


def _parts(axes: Sequence[str], mesh: dict[str, int]) -> int:
    """Return the number of parts that mesh axes divide a dimension into."""
    return math.prod(mesh[axis] for axis in axes)
