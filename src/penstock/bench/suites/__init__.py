"""List the suites of `penstock bench`. Each is a module that defines workloads as data."""

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

    The module has `WORKLOADS`, the default list of workloads. If some of them are equal at their quick sizes, `QUICK` is the
    list without duplicates.

    If there are more workloads than can be listed, the module also has three functions. `add_arguments(parser)` declares its
    options. `choose(args)` returns the workloads to run for the parsed options, or raises `ValueError`. `find(name)` returns
    any workload by its name.
    """
    return importlib.import_module(SUITES[suite])


def find(module_name: str, name: str) -> Workload:
    """Return a workload of a suite's module, by its name.

    Args:
      module_name: the module's full name.
      name: the workload's name.
    """
    module = importlib.import_module(module_name)
    if hasattr(module, "find"):
        return module.find(name)
    return next(workload for workload in module.WORKLOADS if workload.name == name)
