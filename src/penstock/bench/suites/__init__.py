"""Name the suites of `penstock bench`. Each is a module of workloads, as data that the tool runs."""

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
    """Import a suite's module.

    The module has `WORKLOADS`, which run unless others are asked for. It has `QUICK` where some of them do not differ in
    their quick sizes: the list without those.

    It may have `add_arguments(parser)` and `choose(args)`, where there are more workloads than can be listed: `choose` takes
    the parsed arguments, returns the workloads to run, and raises `ValueError`. Such a module also has `find(name)`, which
    returns any of them by its name.
    """
    return importlib.import_module(SUITES[suite])


def find(module_name: str, name: str) -> Workload:
    """Return a workload of a suite's module, by its name."""
    module = importlib.import_module(module_name)
    if hasattr(module, "find"):
        return module.find(name)
    return next(workload for workload in module.WORKLOADS if workload.name == name)
