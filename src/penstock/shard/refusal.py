"""Find what would make a refused step fit: recomputation, parts of the batch, more devices, or fewer rows."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from penstock.errors import SplitError
from penstock.shard.alternatives import Alternatives
from penstock.shard.plan import Plan
from penstock.shard.search.solver import search_briefly
from penstock.shard.trace.recompute import backward_paths
from penstock.shard.trace.step import TracedStep
from penstock.shard.wording import format_share

_TIMES = (2, 4, 8)
"""How many times the devices, how many parts of the batch, and what parts of its rows are tried."""
_MARGIN = 0.97
"""Factor on the limit for what is not compiled before it is taken."""

Make = Callable[..., Plan]


def find_options(
    traced: TracedStep, options: Any, make: Make, needed: float, predicted: float | None
) -> tuple[str, Mapping[str, Plan]]:
    """Return what is predicted to make a refused step fit, as a sentence and as plans.

    Args:
      options: the `Options` of the planning.
      make: plans a step, given options and perhaps another search of meshes.
      needed: the bytes that the smallest plan needs.
      predicted: the bytes that it was predicted to need; None if the stored arguments alone exceed the limit.
    """
    found = list(_Options(traced, options, make, needed, predicted).find())
    if not found:
        return "", {}
    *others, last = (f"with {name}{how}" for name, how, _ in found)
    listed = f"{', '.join(others)}, or {last}" if others else last
    return f"By prediction it fits {listed}: error.options has these plans", Alternatives({name: take for name, _, take in found})


Found = tuple[str, str, Callable[[], Plan]]
"""An option in words, how much slower it is in words, and a function that plans it."""


class _Options:
    """The search for what makes a refused step fit."""

    def __init__(self, traced: TracedStep, options: Any, make: Make, needed: float, predicted: float | None):
        self._traced, self._options, self._make = traced, options, make
        self._needed, self._arguments_fit = needed, predicted is not None
        self._within = int(_MARGIN * (1.0 if predicted is None else min(1.0, predicted / needed)) * options.limit)
        unlimited = self._predict(traced, memory=1 << 60)
        assert unlimited is not None
        self._unlimited = unlimited
        self._batch, self._rows = traced.find_batch([leaf.role for leaf in unlimited.inputs])

    def find(self) -> Iterator[Found]:
        """Yield what is predicted to fit."""
        if self._arguments_fit:
            yield from self._find_rewritings()
        yield from self._find_devices()
        if self._arguments_fit:
            yield from self._find_rows()

    def _times(self, divided: float) -> list[int]:
        """Return how many times may do, given the bytes that are divided by it: fewer cannot."""
        return [times for times in _TIMES if self._needed - divided + divided / times <= self._options.limit]

    def _find_rewritings(self) -> Iterator[Found]:
        """Yield changes of the step that leave its results as they are."""
        again = [{"remat": "auto"}] if self._options.remat is None and backward_paths(self._traced.closed.jaxpr) else []
        stored = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self._traced.inputs) / self._unlimited.device_count
        counts = self._times(self._needed - stored) if self._options.microbatches is None else []
        parts = [{"microbatches": count} for count in counts if self._rows and self._rows % count == 0]
        alone = [found for each in (again, parts) if (found := self._least(each, self._rewrite)) is not None]
        both = [] if alone else [self._least([one | other for one in again for other in parts], self._rewrite)]
        for changes, plan in filter(None, (*alone, *both)):
            name = " and ".join(f"{key}={json.dumps(value)}" for key, value in changes.items())
            yield name, self._slower(plan), functools.partial(self._take, self._traced, **changes)

    def _find_devices(self) -> Iterator[Found]:
        """Yield a mesh with a longer first axis, or its number of devices if the mesh was searched."""
        axis, length = next(iter(self._unlimited.mesh_shape.items()))
        meshes = [self._unlimited.mesh_shape | {axis: times * length} for times in self._times(self._needed)]
        found = self._least(meshes, lambda mesh: self._predict(self._traced, memory=self._within, mesh=mesh, devices=None))
        if found is not None:
            mesh, count = found[0], math.prod(found[0].values())
            changes = {"mesh": mesh, "devices": None} if self._options.mesh is not None else {"devices": count}
            placed = replace(self._options.with_topology(), check=None, **changes)
            yield f"devices={count}", "", functools.partial(self._make, self._traced, placed)

    def _find_rows(self) -> Iterator[Found]:
        """Yield a number of rows."""
        times = [each for each in self._times(self._needed) if self._rows and self._rows % each == 0]
        with contextlib.suppress(Exception):  # of the user's functions: the step cannot be traced with so many rows
            parts = [(each, self._traced.resized(self._batch, Fraction(1, each))) for each in times]
            found = self._least(parts, lambda part: self._predict(part[1], memory=self._within))
            if found is not None:
                (divided, part), _ = found
                yield f"{self._rows // divided} rows", "", functools.partial(self._take, part)

    def _least(self, choices: Sequence[Any], predict: Callable[[Any], Plan | None]) -> tuple[Any, Plan] | None:
        """Return the first choice with which the step is predicted to fit, with the plan; None if it does not fit with the last.

        Each choice needs less memory than those before it.
        """
        with contextlib.suppress(SplitError):  # then it cannot run in any parts
            last = predict(choices[-1]) if choices else None
            if last is not None:
                earlier = ((each, plan) for each in choices[:-1] if (plan := predict(each)) is not None)
                return next(earlier, (choices[-1], last))
        return None

    def _rewrite(self, changes: dict[str, Any]) -> Plan | None:
        return self._predict(self._traced, memory=self._within, **changes)

    def _predict(self, traced: TracedStep, **changes: Any) -> Plan | None:
        """Return a plan by prediction; None if none fits.

        Raises:
          SplitError: the step cannot run in parts.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                plan = self._make(traced, self._options.by_prediction(**changes), solve=search_briefly)
            except SplitError:
                raise
            except ValueError:  # the rows do not divide into these parts, or the arguments alone exceed the limit
                return None
        return plan if plan.cost.memory.total <= changes["memory"] else None

    def _take(self, traced: TracedStep, **changes: Any) -> Plan:
        """Plan as the user asked for, with changes."""
        return self._make(traced, replace(self._options, **changes))

    def _slower(self, plan: Plan) -> str:
        """Return in words how much slower a plan is than the one without a limit."""
        share = plan.cost.seconds / self._unlimited.cost.seconds - 1
        return f" ({format_share(share, 1)} slower than without a limit)" if share > 0 else ""
