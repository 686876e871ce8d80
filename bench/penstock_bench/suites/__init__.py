"""List the suites of `penstock bench`. Each is a module that defines workloads as data."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from penstock_bench.comparing.specification import Specification
from penstock_bench.comparing.workload import workload_of
from penstock_bench.file_import import import_file
from penstock_bench.model import Workload

SUITES = {
    "counters": "penstock_bench.suites.counters",
    "feed": "penstock_bench.suites.feed",
    "frameworks": "penstock_bench.suites.frameworks",
    "keras": "penstock_bench.suites.keras",
    "shard": "penstock_bench.suites.shard",
}


# Before the text of a `Specification`, where a suite would have the name of its module.
COMPARISON = "comparison:"


def is_file(suite: str) -> bool:
    """Tell whether a suite is named by the path of its file."""
    return suite.endswith(".py")


def source_of(suite: str) -> str:
    """Return what a worker process finds a suite by: the name of its module, or the full path of its file."""
    return str(Path(suite).resolve()) if is_file(suite) else SUITES[suite]


def load(suite: str) -> ModuleType:
    """Import a suite's module, by the suite's name or by the path of its file.

    The module has `WORKLOADS`, the default list of workloads. If some of them are equal at their quick sizes, `QUICK` is the
    list without duplicates.

    If there are more workloads than can be listed, the module also has three functions. `add_arguments(parser)` declares its
    options. `choose(args)` returns the workloads to run for the parsed options, or raises `ValueError`. `find(name)` returns
    any workload by its name.
    """
    return _import(source_of(suite))


def find(source: str, name: str) -> Workload:
    """Return a workload of a suite's module, by its name.

    Args:
      source: the module's full name, the path of a file that ends in ".py", or `COMPARISON` and a specification.
      name: the workload's name.
    """
    if source.startswith(COMPARISON):
        return workload_of(Specification.of_text(source.removeprefix(COMPARISON)))
    module = _import(source)
    if hasattr(module, "find"):
        return module.find(name)
    return next(workload for workload in module.WORKLOADS if workload.name == name)


def _import(source: str) -> ModuleType:
    return import_file(Path(source)) if is_file(source) else importlib.import_module(source)
