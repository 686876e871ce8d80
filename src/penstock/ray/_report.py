"""`report`: points of a training go in; metrics of Ray, and those of the result of `run`, come out.

`ray.train.report` would have to be called equally often by every worker, and each call waits until the controller has taken the
one before, two seconds or longer. Loggers are called in process 0 only, and must not wait. So the metrics leave by two ways that
need no other process: the gauges of `ray.util.metrics`, which Ray exports to its dashboard and to Prometheus, and the value that
the worker of process 0 returns at its end.
"""

from __future__ import annotations

import re
from typing import Any

from penstock.ray._versions import require_ray
from penstock.train.point import Logger, Point

last: dict[str, float] = {}
"""The last value of each metric in this process."""


def report() -> Logger:
    """Return a logger for `ps.fit(log=[...])` that gives the metrics to Ray.

    Each metric, such as "loss", becomes a gauge "penstock_loss" of Ray, which its dashboard and Prometheus show (as
    "ray_penstock_loss"). "penstock_step" is the number of steps. The last values are `Result.metrics` of `penstock.ray.run`. No
    worker waits for another one or for Ray. Outside of `penstock.ray.run` it may be used too, where Ray runs.

    Raises:
      UnsupportedVersionError: Ray is not installed, or too old.
    """
    require_ray()
    return _Report()


class _Report:
    def __init__(self) -> None:
        self._gauges: dict[str, Any] = {}

    def __call__(self, point: Point) -> None:
        if point.kind not in ("train", "evaluation"):
            return
        more = {"steps_per_second": point.speed, "input_wait": point.input_wait}
        values = {**point.metrics, **{name: value for name, value in more.items() if value is not None}}
        for name, value in {"step": float(point.step), **values}.items():
            last[name] = value
            self._gauge(name).set(value)

    def _gauge(self, name: str) -> Any:
        from ray.util.metrics import Gauge

        if name not in self._gauges:
            self._gauges[name] = Gauge(f"penstock_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}", f"{name} of ps.fit")
        return self._gauges[name]
