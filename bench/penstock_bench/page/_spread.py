"""Draw the distribution of one metric's numbers: the steps as a density, the runs as dots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.page import Markup, tag
from penstock_bench.number_format import number
from penstock_bench.page import _plot
from penstock_bench.page._axis import Axis, value_axis

_RIGHT = _plot.WIDTH - 16
_BINS = 126
_DENSITY = 40.0  # height of the highest bin
_LEAST = 2.5  # height of a bin that holds a single step among thousands
_DOTS = 30.0
_GAP = 12.0


@dataclass(frozen=True)
class _Row:
    """A row of the plot: one variant, or the second runs of the control.

    Attributes:
      name: the label of the row.
      again: whether these are the second runs of the control.
      runs: the round and the number of each run.
      steps: the numbers of the steps of all runs; empty if the metric has one number for each run.
    """

    name: str
    again: bool
    runs: Sequence[tuple[int, float]]
    steps: np.ndarray

    @property
    def height(self) -> float:
        return _GAP + _DOTS + (_DENSITY if self.steps.size else 0)


def spread(workload: Mapping[str, Any], metric: Mapping[str, Any]) -> Markup | None:
    """Draw the variants in the order of the metric's table; return None if there are no numbers."""
    rows = _rows(workload, metric)
    if not rows:
        return None
    scale = value_axis(_everything(rows), _plot.left_of(row.name for row in rows), _RIGHT)
    rounds = sorted({round_ for row in rows for round_, _ in row.runs})
    drawn, y = [], _plot.TOP
    for row in rows:
        drawn.append(_draw(row, y, scale, rounds, metric["unit"]))
        y += row.height
    what = "single steps and runs" if any(row.steps.size for row in rows) else "runs"
    middle = metric["unit"] + (", log axis" if scale.log else "")
    left, right = ("← worse", "better →") if metric["better"] == "higher" else ("← better", "worse →")
    return _plot.svg(
        "spread",
        f"{metric['name']} of {what}, in {metric['unit']}",
        _plot.height_below(y),
        _plot.axis(scale, y, left, right, middle),
        drawn,
    )


def has_steps(workload: Mapping[str, Any], metric: Mapping[str, Any]) -> bool:
    return any(sample["steps"].get(metric["name"]) for sample in workload["samples"])


def _rows(workload: Mapping[str, Any], metric: Mapping[str, Any]) -> list[_Row]:
    made = []
    for row in metric["rows"]:
        for again in (False, True):
            samples = [
                sample
                for sample in workload["samples"]
                if (sample["variant"], sample["again"]) == (row["variant"], again) and metric["name"] in sample["values"]
            ]
            if samples:
                runs = [(sample["round"], sample["values"][metric["name"]]) for sample in samples]
                steps = [np.asarray(sample["steps"].get(metric["name"], ()), float) for sample in samples]
                name = f"{row['variant']}, again (A/A)" if again else row["variant"]
                made.append(_Row(name, again, runs, np.concatenate(steps)))
    return made


def _everything(rows: Sequence[_Row]) -> list[float]:
    steps = [float(end) for row in rows if row.steps.size for end in (row.steps.min(), row.steps.max())]
    return steps + [value for row in rows for _, value in row.runs]


def _draw(row: _Row, y: float, scale: Axis, rounds: Sequence[int], unit: str) -> Markup:
    count = f"{len(row.runs)} run{'s' if len(row.runs) > 1 else ''}"
    if row.steps.size:
        count += f", {row.steps.size:,} steps"
    middle = float(np.median([value for _, value in row.runs]))
    top, bottom = y + _GAP, y + row.height
    base = bottom - _DOTS
    # Positions are rounded to a grid that is finer than the eye can see, and equal ones are drawn once.
    dots = {
        (scale.at(value), round(base + 5 + (_DOTS - 8) * (rounds.index(at) + 0.5) / len(rounds), 1)): None
        for at, value in row.runs
    }
    return tag(
        "g",
        tag("title", f"{row.name}: median {number(middle)} {unit}, {count}"),
        _plot.name(row.name, (top + bottom) / 2, count),
        _density(row.steps, base, scale) if row.steps.size else None,
        _plot.line(scale.left, base, scale.right, base, "rule faint") if row.steps.size else None,
        _plot.line(scale.at(middle), top, scale.at(middle), bottom, "median"),
        [tag("circle", class_="dot", cx=x, cy=height, r=2.6) for x, height in dots],
        class_="row again" if row.again else "row",
    )


def _density(steps: np.ndarray, base: float, scale: Axis) -> Markup:
    """Draw a histogram of the steps above `base`; all bins have the same width on the plot."""
    positions = [scale.at(value) for value in steps.tolist()]
    counts, edges = np.histogram(positions, bins=_BINS, range=(scale.left, scale.right))
    heights = np.where(counts > 0, np.maximum(_DENSITY * counts / counts.max(), _LEAST), 0.0)
    points = [(scale.left, base)]
    for height, start, end in zip(heights, edges, edges[1:], strict=False):
        points += [(float(start), base - float(height)), (float(end), base - float(height))]
    return _plot.path([*points, (scale.right, base)], "density")
