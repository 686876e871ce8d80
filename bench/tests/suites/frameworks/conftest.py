"""The outputs of workloads at quick size, and their distance from the reference."""

from __future__ import annotations

import pytest

from penstock_bench.model import Outputs
from penstock_bench.outcome import Parity
from penstock_bench.parity import compare_outputs
from penstock_bench.suites.frameworks import find
from penstock_bench.suites.frameworks.experiment import Experiment


@pytest.fixture(scope="session")
def reference():
    """Return a function from a workload's name to the outputs of its reference, in float64 for every precision and attention."""
    known: dict[tuple[str, int], Outputs] = {}

    def outputs(name: str) -> Outputs:
        workload, experiment = find(name), Experiment.parse(name)
        key = (experiment.optimizer, experiment.parity_batch)
        if key not in known:
            known[key] = workload.agreement.reference.outputs(workload.sizes["quick"])
        return known[key]

    return outputs


@pytest.fixture(scope="session")
def compared(reference):
    """From the name of a workload and some outputs to the comparison that the harness would make, by quantity."""

    def compare(name: str, outputs: Outputs) -> dict[str, Parity]:
        agreement = find(name).agreement
        rows = compare_outputs("variant", outputs, reference(name), agreement)
        return {row.quantity: row for row in rows}

    return compare
