"""Draw a forest plot (Lewis and Clarke 2001): one row for each ratio of a metric, with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.page import Content, Markup, tag
from penstock_bench.number_format import number, times
from penstock_bench.page import _plot
from penstock_bench.page._axis import Axis, ratio_axis

_RIGHT = 384.0  # the numbers are right of it
_ROW = 36.0
_ARROW = 6.0


def forest(comparisons: Sequence[Mapping[str, Any]], metric: Mapping[str, Any], claims: bool) -> Markup:
    """Draw the comparisons of a metric: the control first, then the others in their order.

    Args:
      comparisons: from the JSON of the run, at least one.
      metric: from the JSON of the run.
      claims: whether a mark may show that two variants differ; False if a control failed.

    Returns:
      An SVG element.
    """
    ordered = sorted(comparisons, key=lambda comparison: not comparison["control"])
    several = len({comparison["baseline"] for comparison in ordered if not comparison["control"]}) > 1
    names = [_name(comparison, several) for comparison in ordered]
    scale = ratio_axis(
        [comparison["ratio"] for comparison in ordered if comparison["ratio"] is not None],
        [comparison[end] for comparison in ordered for end in ("low", "high") if comparison[end] is not None],
        _plot.left_of(names),
        _RIGHT,
    )
    bottom = _plot.TOP + _ROW * len(ordered)
    heights = [_plot.TOP + _ROW * (place + 0.5) for place in range(len(ordered))]
    rows = [_row(name, one, y, scale, claims) for name, one, y in zip(names, ordered, heights, strict=True)]
    controls = sum(comparison["control"] for comparison in ordered)
    boundary = _plot.TOP + _ROW * controls
    left, right = ("← worse", "better →") if metric["better"] == "higher" else ("← better", "worse →")
    return _plot.svg(
        "forest",
        f"{metric['name']}: ratios with their 95 % intervals",
        _plot.height_below(bottom),
        _plot.axis(scale, bottom, left, right, suffix="×"),
        _plot.line(scale.at(1), _plot.TOP, scale.at(1), bottom, "unity"),
        _plot.line(0, boundary, _plot.WIDTH, boundary, "boundary") if 0 < controls < len(ordered) else None,
        rows,
    )


def _name(comparison: Mapping[str, Any], several: bool) -> str:
    if comparison["control"]:
        return f"A/A: {comparison['variant']}, twice"
    return f"{comparison['variant']} / {comparison['baseline']}" if several else comparison["variant"]


def _row(name: str, comparison: Mapping[str, Any], y: float, scale: Axis, claims: bool) -> Markup:
    ratio, low, high = (comparison[key] for key in ("ratio", "low", "high"))
    control = comparison["control"]
    whole = low is not None and high is not None
    interval = f"{number(low)} – {number(high)}" if whole else "no interval"
    shown = claims and not control and comparison["verdict"] == "different"
    kind = "control" if control else "shown" if shown else "open"
    return tag(
        "g",
        tag("title", f"{name}: {times(ratio)}, 95 %: {interval}" if ratio is not None else f"{name}: no ratio"),
        _plot.name(name, y),
        _interval(low, high, y, scale) if whole else None,
        _mark(ratio, y, scale, control) if ratio is not None else None,
        _plot.text(_RIGHT + 68, y + 4, times(ratio), "ratio", "end", room=64),
        _plot.text(_RIGHT + 76, y + 4, interval if ratio is not None else "not measured", "interval", room=118),
        class_=f"row {kind}",
    )


def _interval(low: float, high: float, y: float, scale: Axis) -> Content:
    """Draw a line from low to high with a stroke at each end; an arrowhead shows that it continues beyond the plot."""
    start, end = scale.at(low), scale.at(high)
    return [
        _plot.line(start, y, end, y, "whisker"),
        _end(start, y, 1 if low < scale.low else 0),
        _end(end, y, -1 if high > scale.high else 0),
    ]


def _end(x: float, y: float, inward: int) -> Markup:
    if not inward:
        return _plot.line(x, y - 6, x, y + 6, "cap")
    inside = x + inward * _ARROW * 1.6
    return _plot.path([(x, y), (inside, y - _ARROW), (inside, y + _ARROW)], "arrow")


def _mark(ratio: float, y: float, scale: Axis, control: bool) -> Markup:
    if ratio <= 0:
        return _end(scale.left, y, 1)
    x = scale.at(ratio)
    if control:
        return _plot.path([(x - 6, y), (x, y - 6), (x + 6, y), (x, y + 6)], "mark")
    return tag("circle", class_="mark", cx=x, cy=y, r=4.2)
