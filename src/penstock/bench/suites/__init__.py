"""The suites, by the name that `penstock bench` knows them by."""

from __future__ import annotations

import importlib

from penstock.bench.model import Workload

SUITES = {"feed": "penstock.bench.suites.feed"}


def workloads(module: str) -> dict[str, Workload]:
    """The workloads of a suite's module, by name and in order."""
    return {workload.name: workload for workload in importlib.import_module(module).WORKLOADS}
