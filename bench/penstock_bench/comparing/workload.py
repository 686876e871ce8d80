"""Make the workload of a comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock_bench.comparing import commands, functions
from penstock_bench.comparing.specification import Specification
from penstock_bench.model import Agreement, Metric, Variant, Workload

# Results may be of any sizes beside each other, so only what may be rounding of float32 is taken for it.
_ROUNDING = 1e-3
_FUNCTION_LIMIT = 600.0  # seconds for the start, and for each block
_COMMAND_LIMIT = 24 * 3600.0  # seconds


@dataclass(frozen=True)
class Size:
    """The size of a comparison: there is only one."""


def workload_of(specification: Specification) -> Workload:
    """Return the workload that compares a user's functions or commands; the first is the baseline."""
    made = _functions if specification.kind == "functions" else _commands
    return made(specification)


def _functions(specification: Specification) -> Workload:
    compared = specification.tolerance is not None

    def variant(name: str, reference: str) -> Variant:
        outputs: Callable[[Any], Any] | None = partial(functions.outputs, reference, specification.inputs) if compared else None
        return Variant(name, live=partial(functions.live, reference, specification.inputs), outputs=outputs)

    variants = tuple(variant(name, reference) for name, reference in specification.variants.items())
    return Workload(
        name="functions",
        title="ms a call",
        metrics=(Metric("time", "ms", "lower"),),
        baseline=variants[0].name,
        variants=variants,
        sizes={"full": Size(), "quick": Size()},
        time_limit=_FUNCTION_LIMIT,
        agreement=None if specification.tolerance is None else _agreement(variants[0], specification.tolerance),
        only_together=True,
        block_seconds=specification.seconds,
    )


def _agreement(first: Variant, tolerance: float) -> Agreement:
    # One by one, because a user's inputs may need more than half of the memory.
    return Agreement("the results of the first call", first, {"output": tolerance}, one_by_one=True, floor=_ROUNDING)


def _commands(specification: Specification) -> Workload:
    return Workload(
        name="commands",
        title="seconds from start to end",
        metrics=(Metric("time", "s", "lower"),),
        baseline=next(iter(specification.variants)),
        variants=tuple(Variant(name, partial(commands.measure, command)) for name, command in specification.variants.items()),
        sizes={"full": Size(), "quick": Size()},
        time_limit=_COMMAND_LIMIT,
        verifies="exit status 0",
        only_together=True,
    )
