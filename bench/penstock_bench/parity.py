"""Compare the outputs of variants with a reference's before timing: return one difference for each quantity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from penstock_bench.model import Agreement, Outputs
from penstock_bench.outcome import Parity


def compare_outputs(variant: str, ours: Outputs, reference: Outputs, agreement: Agreement) -> list[Parity]:
    """Compare a variant's outputs with the reference's.

    Args:
      variant: the variant's name.
      ours, reference: arrays by name.
      agreement: the quantities and their tolerances.

    Returns:
      One entry for each quantity of the agreement, with the output that differs most.
    """
    differences = relative_differences(ours, reference, agreement.floor)
    by_quantity: dict[str, dict[str, float]] = defaultdict(dict)
    for name, difference in differences.items():
        by_quantity[_quantity(name)][name] = difference
    rows = []
    for quantity, tolerance in agreement.tolerances.items():
        # A quantity without outputs counts as different.
        found = by_quantity.get(quantity, {quantity: float("inf")})
        worst = max(found, key=found.__getitem__)
        rows.append(Parity(variant, quantity, found[worst], tolerance, worst, agreement.least.get(quantity, 0.0)))
    return rows


def relative_differences(ours: Outputs, reference: Outputs, floor: float) -> dict[str, float]:
    """Return, for each output, |ours - reference| / max(|reference|, floor · the quantity's root mean square · √size).

    |·| is the Euclidean norm over all elements of the output, in float64. The root mean square is over all floating-point outputs
    of a quantity; integers, such as counters, have no floor. The difference is infinite if only one side has the output, if the
    shapes differ, or if a value is not finite.

    Args:
      ours, reference: arrays by name.
      floor: the share of the root mean square below which an output counts as rounding.
    """
    floors = _floors(reference, floor)
    return {name: _difference(name, ours, reference, floors) for name in [*reference, *(set(ours) - set(reference))]}


def _difference(name: str, ours: Outputs, reference: Outputs, floors: Mapping[str, float]) -> float:
    if name not in ours or name not in reference or ours[name].shape != reference[name].shape:
        return float("inf")
    a, b = (np.asarray(outputs[name], np.float64) for outputs in (ours, reference))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    apart = float(np.linalg.norm(a - b))
    least = floors.get(_quantity(name), 0.0) if reference[name].dtype.kind == "f" else 0.0
    scale = max(float(np.linalg.norm(b)), least * float(np.sqrt(b.size)))
    return apart / scale if scale else (0.0 if apart == 0 else float("inf"))


def _floors(reference: Outputs, floor: float) -> dict[str, float]:
    squares: dict[str, float] = defaultdict(float)
    sizes: dict[str, int] = defaultdict(int)
    for name, values in reference.items():
        if values.dtype.kind != "f":
            continue
        squares[_quantity(name)] += float(np.square(np.asarray(values, np.float64)).sum())
        sizes[_quantity(name)] += values.size
    return {quantity: floor * float(np.sqrt(squares[quantity] / max(sizes[quantity], 1))) for quantity in squares}


def _quantity(name: str) -> str:
    return name.partition(":")[0]
