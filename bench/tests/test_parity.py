from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest

from penstock_bench.model import Agreement, Measurement, Variant
from penstock_bench.parity import compare_outputs, relative_differences

_REFERENCE = {"logits": np.array([3.0, 4.0]), "update: a": np.ones(100), "update: b": np.full(4, 1e-9)}


def _agreement(tolerances, least=MappingProxyType({})) -> Agreement:
    return Agreement("numbers", Variant("reference", lambda size: Measurement()), tolerances, least)


def _differences(**changed):
    ours = {**_REFERENCE, **{name.replace("_", ": "): values for name, values in changed.items()}}
    return relative_differences(ours, _REFERENCE, 0.01)


def test_same_outputs_differ_by_nothing():
    assert set(_differences().values()) == {0.0}


def test_difference_is_relative_to_the_size_of_the_output():
    assert _differences(logits=np.array([3.0, 4.5]))["logits"] == pytest.approx(0.1)


def test_noise_beside_larger_outputs_of_the_quantity_is_no_difference():
    assert _differences(update_b=np.full(4, -1e-9))["update: b"] < 1e-6
    assert _differences(update_b=np.full(4, 0.5))["update: b"] > 10


@pytest.mark.parametrize("values", [np.array([3.0, np.nan]), np.array([3.0, np.inf]), np.array([3.0]), np.ones((2, 1))])
def test_what_cannot_be_compared_differs_infinitely(values):
    assert _differences(logits=values)["logits"] == np.inf


def test_outputs_that_only_one_side_has_differ_infinitely():
    assert relative_differences({}, _REFERENCE, 0.01)["logits"] == np.inf
    assert relative_differences({**_REFERENCE, "more": np.ones(1)}, _REFERENCE, 0.01)["more"] == np.inf


def test_worst_output_of_each_quantity_is_told():
    ours = {**_REFERENCE, "update: a": np.full(100, 1.001)}
    rows = compare_outputs("us", ours, _REFERENCE, _agreement({"logits": 1e-3, "update": 1e-4}))
    assert [(row.quantity, row.worst, row.agreed) for row in rows] == [
        ("logits", "logits", True),
        ("update", "update: a", False),
    ]


def test_difference_that_is_too_small_for_the_precision_is_no_agreement():
    ours = {**_REFERENCE, "logits": _REFERENCE["logits"] * (1 + 1e-7)}
    (row,) = compare_outputs("us", ours, _REFERENCE, _agreement({"logits": 1e-2}, {"logits": 1e-4}))
    assert not row.agreed
    (row,) = compare_outputs("us", ours, _REFERENCE, _agreement({"logits": 1e-2}))
    assert row.agreed


def test_quantity_that_nobody_computed_is_not_agreed_on():
    (row,) = compare_outputs("us", {}, {}, _agreement({"logits": 1e-3}))
    assert not row.agreed
