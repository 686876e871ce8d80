"""What workloads compute at quick size, and how far it is from their reference."""

from __future__ import annotations

import pytest

from penstock.bench.model import Outputs, Parity
from penstock.bench.parity import compare_outputs
from penstock.bench.suites.frameworks import find


@pytest.fixture(scope="session")
def reference():
    """From the name of a workload to what its reference computes."""
    known: dict[str, Outputs] = {}

    def outputs(name: str) -> Outputs:
        workload = find(name)
        key = workload.agreement.name
        if key not in known:
            known[key] = workload.agreement.reference.outputs(workload.sizes["quick"])
        return known[key]

    return outputs


@pytest.fixture(scope="session")
def compared(reference):
    """From the name of a workload and some outputs to the comparison that the harness would make, by quantity."""

    def compare(name: str, outputs: Outputs) -> dict[str, Parity]:
        agreement = find(name).agreement
        rows = compare_outputs("variant", outputs, reference(name), agreement.tolerances, agreement.least)
        return {row.quantity: row for row in rows}

    return compare
