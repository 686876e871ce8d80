"""A plot of a run as a PNG file: loss and accuracy, and how the time of a step was spent. Log points go in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from penstock.recipes.log import Point

# The palette of Okabe and Ito (2008), whose colours colour-blind readers can distinguish.
_LOSS, _ACCURACY = "#D55E00", "#0072B2"
_PARTS = {
    "waiting for input": "#D55E00",
    "dispatch on the host": "#E69F00",
    "waiting for the device": "#0072B2",
    "validation and log": "#BBBBBB",
}


def draw(points: Sequence[Point], path: Path, title: str) -> None:
    """Write a PNG with two panels over the training steps: loss and accuracy, and the parts of a step's time."""
    figure = Figure(figsize=(12, 4.8), dpi=120, layout="constrained")
    figure.suptitle(title)
    learning, timing = figure.subplots(1, 2)
    _draw_learning(learning, points)
    _draw_times(timing, points)
    for axes in (learning, timing):
        axes.set_xlabel("training step")
        axes.set_xlim(0, points[-1].step)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines["top"].set_visible(False)
    figure.savefig(path)


def _draw_learning(axes: Axes, points: Sequence[Point]) -> None:
    steps = [point.step for point in points]
    validated = [(point.step, point.val_accuracy) for point in points if point.val_accuracy is not None]
    marker = "o" if len(points) == 1 else None  # a single point would draw no line
    (loss,) = axes.plot(steps, [point.loss for point in points], color=_LOSS, marker=marker, label="training loss")
    axes.set_yscale("log")
    axes.set_ylabel("cross-entropy loss [nats per image]", color=_LOSS)
    right = axes.twinx()
    accuracies = [point.accuracy for point in points]
    (training,) = right.plot(steps, accuracies, color=_ACCURACY, alpha=0.45, marker=marker, label="training accuracy")
    lines = [loss, training]
    if validated:
        lines += right.plot(*zip(*validated, strict=True), "o-", color=_ACCURACY, markersize=4, label="validation accuracy")
    right.set_ylabel("accuracy [% of images]", color=_ACCURACY)
    right.set_ylim(0, 1.02)
    right.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
    right.spines["top"].set_visible(False)
    # Above the axes, where it cannot cover a curve.
    axes.legend(handles=lines, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize="small")
    axes.set_title("Loss and accuracy", pad=24)


def _draw_times(axes: Axes, points: Sequence[Point]) -> None:
    times = [point.times for point in points]
    parts = np.array([(t.wait, t.dispatch, t.device, t.rest) for t in times])
    per_step = 1000 * parts / np.array([[t.steps] for t in times])
    # A log point describes the interval before it, so the areas begin at step 0.
    steps = [0, *(point.step for point in points)]
    heights = np.concatenate([per_step[:1], per_step]).T
    shares = parts.sum(axis=0) / parts.sum()
    labels = [f"{name}: {share:.1%}".replace("%", " %") for name, share in zip(_PARTS, shares, strict=True)]
    axes.stackplot(steps, heights, labels=labels, colors=list(_PARTS.values()), step="pre", linewidth=0)
    axes.set_ylim(0, 1.35 * heights.sum(axis=0).max())  # leaves room for the legend
    axes.set_ylabel("wall-clock time per step [ms]")
    axes.spines["right"].set_visible(False)
    handles, _ = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="upper right", frameon=False, ncols=2, fontsize="small", columnspacing=1.0
    )  # in the order of the stack
    axes.set_title("Where a step's time went", pad=24)
