"""Search for the fastest plan that fits, where the step may run in parts of its batch and compute values again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import SplitError
from penstock.shard.recomputation import Prepare, RecomputationSearch, fit_rank
from penstock.shard.search.solver import MeshPlan, PreparedMesh, Solve, search_briefly, search_meshes
from penstock.shard.trace.step import TracedStep

NO_BATCH = 'no argument of the step has the role "batch": name it with roles={"its path": "batch"}'
"""The error of a step without a batch."""


class FittingSearch:
    """The search for a plan of a step that may be changed so that it fits.

    Args:
      traced: the step.
      prepared: the meshes, with the search problem of the step.
      prepare: builds the search problem of a changed step on these meshes.
      remat: as in `ps.plan`.
      microbatches: as in `ps.plan`.
      solve: searches meshes.

    Raises:
      ValueError: an option has a wrong value, or is not possible for the step.
    """

    def __init__(
        self,
        traced: TracedStep,
        prepared: Sequence[PreparedMesh],
        prepare: Prepare,
        remat: str | None,
        microbatches: int | str | None,
        solve: Solve = search_meshes,
    ):
        if remat not in (None, "auto", "all"):
            raise ValueError(
                f'remat={remat!r}: None keeps what the step keeps, "auto" decides what is computed again, and "all" ignores '
                "jax.checkpoint"
            )
        self._traced, self._prepare, self._remat, self._solve = traced, prepare, remat, solve
        self._batch, self._rows = traced.find_batch(prepared[0].roles)
        self._devices = math.prod(prepared[0].mesh_shape.values())
        self._whole = ""
        self._counts = self._find_counts(microbatches)
        self._prepared: dict[int, Sequence[PreparedMesh]] = {}
        self._recomputations: dict[int, RecomputationSearch] = {}
        if 1 in self._counts:
            self._add(1, traced, prepared)

    def _find_counts(self, microbatches: int | str | None) -> list[int]:
        """Return the numbers of parts to compare."""
        if microbatches == "auto":
            self._whole = "" if self._batch else NO_BATCH
            return [1, *(count for count in (2**power for power in range(1, self._rows.bit_length())) if self._rows % count == 0)]
        if microbatches is None:
            return [1]
        if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
            raise ValueError(
                f'microbatches={microbatches!r}: a number of parts of the batch, "auto", or None for the whole batch'
            )
        if microbatches > 1 and not self._batch:
            raise ValueError(f"microbatches={microbatches}: {NO_BATCH}")
        if self._rows % microbatches:
            raise ValueError(f"microbatches={microbatches}: the {self._rows} rows of the batch do not divide into so many parts")
        return [microbatches]

    def _add(self, count: int, step: TracedStep, prepared: Sequence[PreparedMesh]) -> None:
        """Add the step in a number of parts."""
        self._prepared[count] = prepared
        if self._remat is not None:
            self._recomputations[count] = RecomputationSearch(step, prepared, self._prepare)

    def search(self, limit: float) -> MeshPlan:
        """Return the fastest plan that is found to fit a limit; if none fits, the plan of least memory of the whole batch."""
        best, count = self._search(self._counts[0], limit, self._solve), self._choose_count(limit)
        if count != self._counts[0]:
            found = self._search(count, limit, self._solve)
            best = min(best, found, key=lambda plan: fit_rank(plan, limit)) if found.candidate.memory <= limit else best
        assert best.proof is not None
        if self._remat is None and len(self._counts) == 1:
            return best
        return replace(best, proof=replace(best.proof, memory=0.0))  # other changes of the step may need less

    def _choose_count(self, limit: float) -> int:
        """Return the number of parts that is best by brief searches."""
        chosen, *others = self._counts
        best = self._search(chosen, limit, search_briefly) if others else None
        for count in others:
            assert best is not None
            if best.candidate.memory <= limit and not best.prepared.model.rewriting.recomputed:
                break  # more parts would be slower
            try:
                found = self._search(count, limit, search_briefly)
            except SplitError as error:
                if count == others[0]:
                    self._whole = str(error)
                break
            if fit_rank(found, limit) < fit_rank(best, limit):
                best, chosen = found, count
            elif best.candidate.memory <= limit:
                break
        return chosen

    def _search(self, count: int, limit: float, solve: Solve) -> MeshPlan:
        """Search for a plan with a number of parts.

        Raises:
          SplitError: the step cannot run in them.
        """
        if count not in self._prepared:
            step = self._split(count)
            self._add(count, step, self._prepare(step))
        if count in self._recomputations:
            return self._recomputations[count].search(limit, solve)
        return solve(self._prepared[count], limit, math.inf)

    def _split(self, count: int) -> TracedStep:
        """Return the step in a number of parts.

        Raises:
          SplitError: it cannot run in them.
        """
        whole = self._traced.rewriting
        groups = math.gcd(self._devices, self._rows // count)
        try:
            return self._traced.rewrite(replace(whole, microbatches=count, batch=self._batch, groups=groups))
        except SplitError:
            if groups == 1:
                raise
        return self._traced.rewrite(replace(whole, microbatches=count, batch=self._batch))

    def describe(self, found: MeshPlan) -> tuple[str, ...]:
        """Return sentences about what a plan changes in the step."""
        rewriting = found.prepared.model.rewriting
        count = rewriting.microbatches
        about = [f"the batch stays whole: {self._whole}"] if self._whole else []
        if count > 1:
            rows = self._rows // count
            about = [f"the batch runs in {count} parts of {rows} rows, one after the other, and their gradients are added up"]
        again = self._recomputations[count].describe(found) if self._recomputations else ()
        return (*about, *again)
