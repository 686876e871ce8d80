"""A short call of `fit`, a logger that keeps its points, and a mesh, for the tests of `fit`."""

import jax
from jax.sharding import AxisType
from tests.train import models

import penstock as ps


class Points(list):
    """A logger that keeps all points."""

    def __call__(self, point):
        self.append(point)

    def of(self, kind):
        return [point for point in self if point.kind == kind]


def fit(steps, checkpoint=None, feed=None, **settings):
    return ps.fit(
        settings.pop("step", models.step),
        settings.pop("state", models.init),
        models.loader() if feed is None else feed,
        steps=steps,
        checkpoint=checkpoint,
        **{"log": [], **settings},
    )


def mesh(devices):
    return jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
