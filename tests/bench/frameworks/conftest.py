"""How far outputs are from the reference's, and experiments small enough to run in a test."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.bench.model import Outputs
from penstock.bench.suites.frameworks import find


def _differences(outputs: Outputs, reference: Outputs) -> dict[str, float]:
    assert set(outputs) == set(reference)
    return {quantity: _difference(outputs, reference, quantity) for quantity in ("logits", "loss", "update")}


def _difference(outputs: Outputs, reference: Outputs, quantity: str) -> float:
    """The worst of the quantity's outputs; nearly zero ones are judged by the size of the others."""
    names = [name for name in reference if name.partition(":")[0] == quantity]
    rms = np.sqrt(np.mean(np.concatenate([np.ravel(reference[name]) for name in names]) ** 2))

    def of(name: str) -> float:
        assert outputs[name].shape == reference[name].shape
        floor = 0.01 * rms * np.sqrt(reference[name].size)
        return float(np.linalg.norm(outputs[name] - reference[name]) / max(np.linalg.norm(reference[name]), floor))

    return max(map(of, names))


@pytest.fixture(scope="session")
def differences():
    return _differences


@pytest.fixture(scope="session")
def reference():
    """From the name of a workload to what its reference computes at quick size."""
    known: dict[str, Outputs] = {}

    def outputs(name: str) -> Outputs:
        workload = find(name)
        key = workload.agreement.name
        if key not in known:
            known[key] = workload.agreement.reference.outputs(workload.sizes["quick"])
        return known[key]

    return outputs
