"""Enforce the memory limit.

In: functions that search for plans, write them as records and compile them. Out: a record that fits the limit. A plan is compiled
if its prediction is near the limit. The ratio of the prediction and the compiler's figure then corrects the limit of the next
search: down if the plan does not fit, and up if it needs less than predicted, so that a faster plan is found. Nothing is refused
by prediction; only stored arguments are counted exactly. Before a refusal, plans that leave the step to the compiler are tried.
They and the baselines are also tried where the compiler was asked to decide and its program costs more than predicted.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from penstock.shard.compiler import Compiler
from penstock.shard.errors import CompileError, CompilerFailedError, CompilerMemoryError, PlanError
from penstock.shard.hlo.analysis import Measured
from penstock.shard.left_to_compiler import stored_layouts, with_cost_of
from penstock.shard.record import PlanRecord
from penstock.shard.refusals import describe_arguments, describe_excess, describe_unchecked
from penstock.shard.search.cost_model import Assignment
from penstock.shard.search.mesh_search import MeshPlan, PreparedMesh
from penstock.shard.trace.step import TracedStep

_LARGEST = 6000
"""Steps with more sharding constraints than this are compiled only on request, or before they are refused. A step at this size
compiles in some seconds."""
_COMPILATIONS = 4
"""The most plans that are compiled, other than the baselines before a refusal."""
_RESCUED = 1.5
"""More plans that are left to the compiler are tried if the smallest so far needs at most this many times the limit."""
_CLOSER = 0.98
"""Factor on a corrected limit, so that the search does not find the same plan again."""
_WORTHWHILE = 1.05
"""A search is repeated with a higher limit if it is higher by this factor."""
_FASTER = 0.98
"""A plan is compiled for its speed if it is predicted to take less than this fraction of the time of one that fits."""
_MORE_COSTLY = 1.05
"""Contenders are compiled if the program of a plan costs more than its prediction by this factor."""
_CONTENDERS = 8
"""The most contenders that are compiled."""
CHOSEN_BY_PROGRAM = "chosen because its compiled program costs less than that of the plan of least predicted cost"

Search = Callable[[float], MeshPlan]
Write = Callable[[PreparedMesh, Assignment], PlanRecord]
WriteLeft = Callable[[PreparedMesh, Assignment], list[PlanRecord]]


def enforce_limit(
    search: Search,
    write: Write,
    write_left: WriteLeft,
    choose_compiler: Callable[[], Compiler],
    traced: TracedStep,
    least_arguments: Callable[[], float],
    baselines: Mapping[str, MeshPlan],
    limit: int,
    check: bool | str | None,
) -> PlanRecord:
    """Return the fastest plan that was found to fit its memory limit; raise if none was.

    Args:
      search: returns the best decisions for a limit in bytes; those of least memory if none fit by prediction.
      write: writes decisions as a record.
      write_left: writes decisions as records that leave the step to the compiler.
      choose_compiler: returns the compiler that decides.
      traced: the step.
      least_arguments: returns the fewest bytes of stored arguments that any layout has on a device.
      baselines: the baselines by name.
      limit: bytes that one device may hold.
      check: as in `ps.plan`.

    Returns:
      The plan, with the compiler's figures if it was compiled. A warning says so if it could not be compiled, or if it should not
      be and is predicted above its limit.

    Raises:
      PlanError: no plan fits once compiled, or the stored arguments alone exceed the limit.
      CompileError: the plan does not compile, and `check` asks for it.
    """
    found = search(limit)
    plan = write(found.prepared, found.candidate.assignment)
    above = plan.cost.memory.total > limit
    if above and (least := least_arguments()) > limit:
        raise PlanError(describe_arguments(found.prepared, found.candidate.assignment, traced, limit, least))
    small = len(plan.sharding_constraints.results) <= _LARGEST
    if not check and not above and not (check is None and small and plan.unchecked):
        return plan
    compiler = choose_compiler()
    if compiler.compile is None:
        return _warn_unchecked(plan, compiler.remark)
    trials = _Trials(search, write, write_left, compiler.compile, baselines, plan)
    try:
        trials.run(found, plan)
        if check and trials.fastest is not None:
            return trials.fastest_program()
    except CompileError as error:
        if trials.fastest is not None:
            return trials.fastest
        if check and not isinstance(error, CompilerFailedError):
            raise
        failed = replace(trials.current, compiler_failed=True)
        return _warn_unchecked(failed, f"could not be compiled here to check that it fits: {error}")
    if trials.fastest is None:
        smallest = trials.smallest
        raise PlanError(
            describe_excess(
                smallest.prepared, smallest.assignment, smallest.plan, smallest.needed, traced, compiler, trials.count
            )
        )
    return trials.fastest


def least_arguments(prepared: PreparedMesh) -> float:
    """Return the fewest bytes of stored arguments that a device has in any layout on a mesh.

    Args:
      prepared: the mesh, with its search problem.
    """
    problem = prepared.problem
    names, lengths, nodes = problem.links.names, problem.links.sizes, problem.graph.nodes
    return sum(size / _most_shards(nodes[node].sizes, nodes[node].fixed, names, lengths) for node, size in problem.stored)


@dataclass(frozen=True)
class _Trial:
    """A plan that was compiled.

    Attributes:
      prepared: its mesh.
      assignment: its decisions.
      plan: the same as a record, with the compiler's figures unless the compiler refused it.
      needed: the bytes that it needs, as the compiler says.
      fits: whether it fits the limit.
    """

    prepared: PreparedMesh
    assignment: Assignment
    plan: PlanRecord
    needed: float
    fits: bool


class _Trials:
    """Plans that are compiled one after the other, to find the fastest that fits.

    Attributes:
      current: the plan that was compiled last, or is being compiled.
    """

    def __init__(
        self,
        search: Search,
        write: Write,
        write_left: WriteLeft,
        compile_record: Callable[[PlanRecord], Measured],
        baselines: Mapping[str, MeshPlan],
        plan: PlanRecord,
    ) -> None:
        self._search, self._write, self._compile, self._limit = search, write, compile_record, plan.limit
        self._write_left, self._baselines = write_left, baselines
        self._done: list[_Trial] = []
        self.current = plan

    @property
    def fastest(self) -> PlanRecord | None:
        """Return the fastest plan that fits; None if there is none."""
        return min((each.plan for each in self._fitting), key=lambda plan: plan.cost.seconds, default=None)

    @property
    def smallest(self) -> _Trial:
        """Return the trial that needs the least memory."""
        return min(self._done, key=lambda each: each.needed)

    @property
    def count(self) -> int:
        """Return the number of plans that were compiled."""
        return len(self._done)

    def run(self, found: MeshPlan, plan: PlanRecord) -> None:
        """Compile what the first search found, and then what searches with corrected limits find.

        If none of these fits, compile the baselines too, and then plans that leave the step to the compiler.

        Args:
          found: the decisions that the first search found.
          plan: the same as a record.
        """
        self._try(found.prepared, found.candidate.assignment, plan)
        self._correct()
        if not self._fitting:
            self._compile_baselines()
            if self._fitting:
                self._correct()
        if not self._fitting:
            self._leave_to_compiler()

    def _correct(self) -> None:
        """Search again with a corrected limit, and compile what is found, as long as it may be better."""
        while len(self._done) < _COMPILATIONS:
            better = self._search_again()
            if better is None:
                return
            self._try(*better)

    def _compile_baselines(self) -> None:
        """Compile the baselines that may fit, those of least predicted memory first, until one fits and the others are slower."""
        for each in sorted(self._baselines.values(), key=lambda each: each.candidate.memory):
            plan, best = self._write(each.prepared, each.candidate.assignment), self.fastest
            if plan.cost.memory.arguments > self._limit or self._was_tried(plan):
                continue
            if best is None or (plan.cost.seconds < best.cost.seconds and len(self._done) < _COMPILATIONS):
                self._try(each.prepared, each.candidate.assignment, plan)

    def _leave_to_compiler(self) -> None:
        """Compile plans that leave the step to the compiler; their compiled programs say which is the fastest.

        Those that are stored as by FSDP are always tried: layouts inside of the step made a RegNet take twice the memory.
        """
        for number, (prepared, assignment) in enumerate(stored_layouts(self._baselines)):
            if number and self.smallest.needed > _RESCUED * self._limit:
                return
            for plan in self._write_left(prepared, assignment):
                if plan.cost.memory.arguments <= self._limit and not self._was_tried(plan):
                    try:
                        self._try(prepared, assignment, plan)
                    except CompilerFailedError:  # XLA aborts for some layouts that it chooses; others may do
                        continue
                    self._done[-1] = _with_cost_of_program(self._done[-1])

    def fastest_program(self) -> PlanRecord:
        """Return the plan that fits and whose program costs the least.

        If the program of the fastest plan costs more than predicted, the compiler added collectives to those of its layouts.
        Layouts with a higher prediction may then be faster, so contenders are compiled. Near-ties are won by the plan that the
        search found, and among contenders by the one that needs the least memory.
        """
        best = min(self._fitting, key=lambda each: each.plan.cost.seconds)
        if not _costs_more_than_predicted(best):
            return best.plan
        before = len(self._done)
        for prepared, assignment, plan in itertools.islice(self._contenders(best), _CONTENDERS):
            try:
                self._try(prepared, assignment, plan)
            except CompileError:
                break
        contenders = [each for each in self._done[before:] if each.fits]
        fastest = min(map(_seconds_of_program, contenders), default=math.inf)
        if fastest > _FASTER * _seconds_of_program(best):
            return best.plan
        near_ties = [each for each in contenders if _FASTER * _seconds_of_program(each) <= fastest]
        first = min(near_ties, key=lambda each: each.needed)
        if first.plan.left_to_compiler:
            return _with_cost_of_program(first).plan
        return replace(first.plan, remarks=(*first.plan.remarks, CHOSEN_BY_PROGRAM))

    def _contenders(self, best: _Trial) -> Iterator[tuple[PreparedMesh, Assignment, PlanRecord]]:
        """Yield plans whose programs may cost less than that of the fastest plan, those of least predicted cost first.

        They are the baselines, and its layouts and those of `stored_layouts` left to the compiler.
        """
        found = [(each.prepared, each.candidate.assignment) for each in self._baselines.values()]
        written = [(*each, self._write(*each)) for each in found]
        for layouts in [(best.prepared, best.assignment), *stored_layouts(self._baselines)]:
            written += [(*layouts, plan) for plan in self._write_left(*layouts)]
        for each in sorted(written, key=lambda each: each[2].cost.seconds):
            if each[2].cost.memory.arguments <= self._limit and not self._was_tried(each[2]):
                yield each

    def _try(self, prepared: PreparedMesh, assignment: Assignment, plan: PlanRecord) -> None:
        """Compile a plan, which is given as decisions and as a record."""
        self.current = plan
        try:
            measured = self._compile(plan)
        except CompilerMemoryError as error:
            needed = error.needed or max(plan.cost.memory.total, self._limit + 1)
            self._done.append(_Trial(prepared, assignment, plan, needed, fits=False))
            return
        fits = measured.memory <= self._limit
        self._done.append(_Trial(prepared, assignment, replace(plan, checked=measured), measured.memory, fits))

    @property
    def _fitting(self) -> list[_Trial]:
        return [each for each in self._done if each.fits]

    def _search_again(self) -> tuple[PreparedMesh, Assignment, PlanRecord] | None:
        """Return what a search with a corrected limit finds, if it was not compiled yet and may be better; else None."""
        too_large = [each for each in self._done if not each.fits]
        within = min((_CLOSER * _predicted(each) * min(1.0, self._limit / each.needed) for each in too_large), default=math.inf)
        best = self.fastest
        if best is not None:
            assert best.checked is not None
            if not _is_limited(best):
                return None
            within = min(within, best.cost.memory.total * self._limit / max(best.checked.memory, 1))
            if within < _WORTHWHILE * max(best.cost.memory.total, self._limit):
                return None
        found = self._search(within)
        prepared, assignment = found.prepared, found.candidate.assignment
        plan = self._write(prepared, assignment)
        slower = best is not None and plan.cost.seconds > _FASTER * best.cost.seconds
        return None if slower or self._was_tried(plan) else (prepared, assignment, plan)

    def _was_tried(self, plan: PlanRecord) -> bool:
        """Return whether a plan with the same layouts was compiled."""
        layouts = (plan.mesh_shape, plan.inputs, plan.sharding_constraints)
        return any((each.plan.mesh_shape, each.plan.inputs, each.plan.sharding_constraints) == layouts for each in self._done)


def _with_cost_of_program(trial: _Trial) -> _Trial:
    """Return a trial whose plan costs what its compiled program says, if the compiler made one."""
    plan, hardware = trial.plan, trial.prepared.problem.hardware
    return trial if plan.checked is None else replace(trial, plan=with_cost_of(plan, plan.checked, hardware))


def _seconds_of_program(trial: _Trial) -> float:
    """Return the cost of a compiled program, in seconds, if nothing is hidden."""
    return _with_cost_of_program(trial).plan.cost.seconds


def _costs_more_than_predicted(trial: _Trial) -> bool:
    """Return whether a program costs more than predicted, if nothing is hidden: in all, or for the bytes that it sends.

    The compiler combines small collectives, which may save as much latency as the bytes that it adds take.
    """
    program, predicted = _with_cost_of_program(trial).plan.cost, trial.plan.cost
    added = program.communication * (1 - predicted.bytes_on_wire / max(program.bytes_on_wire, 1.0))
    without = program.seconds / _MORE_COSTLY
    return predicted.compute + predicted.communication < without or program.seconds - added < without


def _predicted(trial: _Trial) -> float:
    """Return the bytes that a plan was predicted to need."""
    return float(trial.plan.cost.memory.total)


def _is_limited(plan: PlanRecord) -> bool:
    """Return whether a plan may be slower than others because of its limit: it is near it, or a baseline is faster."""
    return plan.near_limit or any(each.seconds < plan.cost.seconds for each in plan.baselines.values())


def _warn_unchecked(plan: PlanRecord, reason: str) -> PlanRecord:
    """Warn that a plan was not compiled, and return it."""
    warnings.warn(describe_unchecked(plan, reason), stacklevel=5)
    return plan


@functools.lru_cache(maxsize=4096)
def _most_shards(
    sizes: tuple[int, ...], fixed: tuple[tuple[str, ...] | None, ...] | None, names: tuple[str, ...], lengths: tuple[int, ...]
) -> int:
    """Return over how many devices a stored leaf can be sharded at most.

    Args:
      sizes: sizes of its dimensions.
      fixed: for each dimension, the mesh axes that the user prescribes; None if there are none.
      names, lengths: the mesh axes.
    """
    most = 1
    for dims in itertools.product(range(-1, len(sizes)), repeat=len(names)):  # the dimension that each mesh axis shards, or none
        shards = [math.prod(length for length, at in zip(lengths, dims, strict=True) if at == dim) for dim in range(len(sizes))]
        kept = fixed is None or all(
            entry is None or set(entry) == {name for name, at in zip(names, dims, strict=True) if at == dim}
            for dim, entry in enumerate(fixed)
        )
        if kept and all(size % count == 0 for size, count in zip(sizes, shards, strict=True)):
            most = max(most, math.prod(shards))
    return most
