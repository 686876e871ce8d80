"""The suites, by the name that `penstock bench` knows them by."""

from __future__ import annotations

import importlib
from types import ModuleType

from penstock.bench.model import Workload

SUITES = {
    "feed": "penstock.bench.suites.feed",
    "frameworks": "penstock.bench.suites.frameworks",
    "keras": "penstock.bench.suites.keras",
    "shard": "penstock.bench.suites.shard",
}


def load(suite: str) -> ModuleType:
    """A suite's module. It has `WORKLOADS`, those that run unless others are asked for, and `QUICK` where some of them are
    alike in their quick sizes: those that are not.

    It may have `add_arguments(parser)` and `choose(args)`, from the parsed arguments to the workloads to run, where there are
    more than can be listed; then it has `find(name)`, from a name to any of them. `choose` raises `ValueError`.

    A suite that times nothing has `run(args)`, from the arguments of its `add_arguments` to the exit status: then the harness
    runs its `WORKLOADS` in a report of all suites only.
    """
    return importlib.import_module(SUITES[suite])


def find(module_name: str, name: str) -> Workload:
    """A workload of a suite's module, by its name."""
    module = importlib.import_module(module_name)
    if hasattr(module, "find"):
        return module.find(name)
    return next(workload for workload in module.WORKLOADS if workload.name == name)
