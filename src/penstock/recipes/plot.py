"""Plot a run from the lines of its metrics.jsonl, as a PNG file: loss and accuracy, and how the time of a step was spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

# The palette of Okabe and Ito (2008), whose colours colour-blind readers can distinguish.
_LOSS, _ACCURACY = "#D55E00", "#0072B2"
_PARTS = {"the devices starved for input": "#D55E00", "training": "#0072B2"}

Line = Mapping[str, Any]


def draw(lines: Sequence[Line], path: Path, title: str) -> None:
    """Write a PNG with two panels over the training steps: loss and accuracy, and the parts of a step's time."""
    points = [line for line in lines if "steps_per_second" in line]
    figure = Figure(figsize=(12, 4.8), dpi=120, layout="constrained")
    figure.suptitle(title)
    learning, timing = figure.subplots(1, 2)
    _draw_learning(learning, points, [line for line in lines if "val_accuracy" in line])
    _draw_times(timing, points)
    for axes in (learning, timing):
        axes.set_xlabel("training step")
        axes.set_xlim(0, points[-1]["step"])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines["top"].set_visible(False)
    figure.savefig(path)


def _draw_learning(axes: Axes, points: Sequence[Line], validated: Sequence[Line]) -> None:
    steps = [point["step"] for point in points]
    marker = "o" if len(points) == 1 else None  # a single point would draw no line
    (loss,) = axes.plot(steps, [point["loss"] for point in points], color=_LOSS, marker=marker, label="training loss")
    axes.set_yscale("log")
    axes.set_ylabel("cross-entropy loss [nats per image]", color=_LOSS)
    right = axes.twinx()
    accuracies = [point["accuracy"] for point in points]
    (training,) = right.plot(steps, accuracies, color=_ACCURACY, alpha=0.45, marker=marker, label="training accuracy")
    lines = [loss, training]
    if validated:
        values = [(line["step"], line["val_accuracy"]) for line in validated]
        lines += right.plot(*zip(*values, strict=True), "o-", color=_ACCURACY, markersize=4, label="validation accuracy")
    right.set_ylabel("accuracy [% of images]", color=_ACCURACY)
    right.set_ylim(0, 1.02)
    right.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
    right.spines["top"].set_visible(False)
    # Above the axes, where it cannot cover a curve.
    axes.legend(handles=lines, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize="small")
    axes.set_title("Loss and accuracy", pad=24)


def _draw_times(axes: Axes, points: Sequence[Line]) -> None:
    per_step = np.array([1000 / point["steps_per_second"] for point in points])
    starved = per_step * [point["input_wait"] for point in points]
    parts = np.stack([starved, per_step - starved])
    # A log point describes the interval before it, so the areas begin at step 0.
    steps = [0, *(point["step"] for point in points)]
    heights = np.concatenate([parts[:, :1], parts], axis=1)
    shares = parts @ np.diff(steps) / (per_step @ np.diff(steps))
    labels = [f"{name}: {share:.1%}".replace("%", " %") for name, share in zip(_PARTS, shares, strict=True)]
    axes.stackplot(steps, heights, labels=labels, colors=list(_PARTS.values()), step="pre", linewidth=0)
    axes.set_ylim(0, 1.35 * np.quantile(per_step, 0.99))  # leaves room for the legend
    axes.set_ylabel("wall-clock time per step [ms]")
    axes.spines["right"].set_visible(False)
    handles, _ = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper right", frameon=False, fontsize="small")  # in the order of the stack
    axes.set_title("Where a step's time went", pad=24)
