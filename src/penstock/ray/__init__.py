"""Trainings on a Ray cluster: an ordinary function that calls `ps.fit` runs in several processes, and continues after failures.

import penstock.ray as pr

def train(folder):
    loader = ps.Loader(pr.source(dataset), batch_size=256, shuffle=True)
    return ps.fit(step, init, loader, steps=10_000, checkpoint=folder, log=[pr.report()])

result = pr.run(train, {"folder": "/shared/runs/a"}, workers=(2, 8), resources={"GPU": 1})
"""

from penstock.ray._run import Result as Result
from penstock.ray._run import run as run
from penstock.ray._source import RaySource as RaySource
from penstock.ray._source import source as source
from penstock.ray._worker import report as report
