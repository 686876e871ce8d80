"""Enforce the memory limit: return the fastest plan that was found to fit, or say why there is none.

Nothing is refused by prediction; only stored arguments are counted exactly. A plan is compiled if its prediction is near the
limit. The ratio of the prediction and the compiler's figure then corrects the limit of the next search: down if the plan does not
fit, and up if it needs less than predicted, so that a faster plan is found.

Before a refusal, plans that leave the step to the compiler are tried. They store the arguments in the layouts of the baselines,
as expert users of `jax.jit` do. They and the baselines are also tried where the compiler was asked to decide and its program
costs more than predicted. Their collectives are not predicted, so their cost is the cost of the compiled program.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock._bytes import counted, format_bytes
from penstock.errors import CompileError, CompilerFailedError, CompilerMemoryError, PlanError
from penstock.shard.apply.sharding_constraints import ShardingConstraints
from penstock.shard.compiler import Compiler
from penstock.shard.graph.roles import find_batch_dims
from penstock.shard.hlo.analysis import Measured, speed_of
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.mesh.resharding import MeshLinks, sent_times, union
from penstock.shard.mesh.shapes import describe_mesh
from penstock.shard.record import LeafLayout, PlanRecord
from penstock.shard.search.baselines import FSDP, MEGATRON, MEGATRON_FSDP, by_largest_dim, split_storage
from penstock.shard.search.costs import Assignment, PlannedCollective, Proof, live_values_at_peak
from penstock.shard.search.solver import MeshPlan, PreparedMesh
from penstock.shard.trace.flat_program import ALIASES, FlatProgram, Op
from penstock.shard.trace.source_lines import describe_source
from penstock.shard.trace.step import TracedStep
from penstock.shard.wording import format_share, format_type

UNCHECKED = "the plan is unchecked"
"""The first words of the warning about a plan that is not known to fit."""
_MOST_NAMED = 3
"""The most arguments, and the most activations, that a message names."""
LEFT_TO_COMPILER = (
    "the compiler chooses the layouts inside of the step, because plans that give them do not fit, or are slower once compiled; "
    "the cost is the compiled program's"
)
_MOST_CONSTRAINTS = 6000
"""Steps with more sharding constraints than this are compiled only on request, or before they are refused. A step at this size
compiles in some seconds."""
_COMPILATIONS = 4
"""No search with a corrected limit, and no faster baseline after a plan that fits, is compiled once so many plans were. If only
a baseline fits then, half as many follow: for an LSTM on 16 H100s, the baseline took five times as long as the plan that did."""
_AT_ONCE = 4
"""How many plans are compiled before the next decision, where several may fit."""
_MAY_FIT = 1.5
"""A plan is not compiled if it is expected to need more than this many times the limit. Its prediction is corrected by the least
ratio of figure and prediction among the compiled plans. In 20 steps of other packages on TPUs, a baseline needed 0.70 times the
expected memory, or more."""
_LIMIT_MARGIN = 0.98
"""Factor on a corrected limit, so that the search does not find the same plan again."""
_LEAST_RAISE = 1.05
"""A search is repeated with a higher limit if it is higher by this factor."""
_FASTER = 0.98
"""A plan is compiled for its speed if its predicted time is less than this fraction of the time of a plan that fits."""
_MORE_COSTLY = 1.05
"""Contenders are compiled if the program of a plan costs more than its prediction by this factor."""
CHOSEN_BY_PROGRAM = "chosen because its compiled program costs less than the program of the plan of least predicted cost"

Search = Callable[[float], MeshPlan]
Write = Callable[[MeshPlan], PlanRecord]
WriteLeft = Callable[[PreparedMesh, Assignment], list[PlanRecord]]
Advise = Callable[[float, float | None], tuple[str, Mapping[str, Any]]]


def enforce_limit(
    search: Search,
    write: Write,
    write_left: WriteLeft,
    choose_compiler: Callable[[], Compiler],
    traced: TracedStep,
    meshes: Sequence[PreparedMesh],
    baselines: Mapping[str, MeshPlan],
    limit: int,
    check: bool | str | None,
    advise: Advise,
) -> PlanRecord:
    """Return the fastest plan that was found to fit its memory limit.

    Args:
      search: returns the best decisions for a limit in bytes; the decisions of least memory if none fit by prediction.
      write: writes decisions as a record.
      write_left: writes decisions as records that leave the step to the compiler.
      choose_compiler: returns the compiler that decides.
      meshes: all meshes that are searched.
      check: as in `ps.plan`.
      advise: returns what would help, in words and as plans, given the bytes that the smallest plan needs, and those that it was
        predicted to need. The latter are None if the arguments alone exceed the limit.

    Returns:
      The plan, with the compiler's figures if it was compiled. It warns if the plan could not be compiled, or if it should not
      be and is predicted above its limit.

    Raises:
      PlanError: no plan fits once compiled, or the stored arguments and the constants alone exceed the limit.
      CompileError: the plan does not compile, and `check` asks for it.
    """
    smallest, sizes = min(((each, least_arguments(each)) for each in meshes), key=lambda each: sum(each[1]))
    if sum(sizes) + traced.constant_bytes > limit:
        least = sum(sizes) + traced.constant_bytes
        advice, options = advise(least, None)
        raise PlanError(_describe_arguments(smallest, sizes, traced, limit, advice), math.ceil(least), options)
    found = search(limit)
    plan = write(found)
    above = plan.cost.memory.total > limit
    small = len(plan.sharding_constraints.results) <= _MOST_CONSTRAINTS
    if not check and not above and not (check is None and small and plan.unchecked):
        return plan
    compiler = choose_compiler()
    if compiler.compile is None:
        return warn_unchecked(plan, compiler.remark)
    trials = _Trials(search, write, write_left, compiler.compile, baselines, limit, plan)
    try:
        trials.run(found, plan)
        if check and trials.fastest is not None:
            return trials.fastest_program(found.faster)
    except CompileError as error:
        if trials.fastest is not None:
            return trials.fastest
        if check and not isinstance(error, CompilerFailedError):
            raise
        failed = replace(trials.current, compiler_failed=True)
        return warn_unchecked(failed, f"could not be compiled here to check that it fits: {error}")
    if trials.fastest is None:
        trial = trials.smallest
        advice, options = advise(trial.needed, trial.plan.cost.memory.total)
        message = _describe_excess(trial, traced, compiler, len(trials.done), plan.proof, advice)
        raise PlanError(message, math.ceil(trial.needed), options)
    return trials.fastest


def least_arguments(prepared: PreparedMesh) -> list[float]:
    """Return, for each stored argument, the fewest bytes of it that a device has in any layout on a mesh."""
    costs = prepared.costs
    names, lengths, nodes = costs.links.names, costs.links.sizes, costs.graph.nodes
    return [size / _most_shards(nodes[node].sizes, nodes[node].fixed, names, lengths) for node, size in costs.stored]


@dataclass(frozen=True)
class _Trial:
    """A plan that was compiled.

    Attributes:
      prepared: its mesh.
      assignment: its decisions.
      plan: the same as a record, with the compiler's figures unless the compiler refused it.
      needed: the bytes that it needs, by the compiler's figures.
      fits: whether it fits the limit.
    """

    prepared: PreparedMesh
    assignment: Assignment
    plan: PlanRecord
    needed: float
    fits: bool


Candidate = tuple[PreparedMesh, Assignment, PlanRecord]


@dataclass
class _Trials:
    """Plans that are compiled one after the other, to find the fastest that fits.

    Attributes:
      search, write, write_left, baselines, limit: as in `enforce_limit`.
      compile: as in `Compiler`.
      current: the plan that was compiled last, or that did not compile.
      done: the plans that were compiled.
    """

    search: Search
    write: Write
    write_left: WriteLeft
    compile: Callable[[Sequence[PlanRecord]], list[Measured | CompileError]]
    baselines: Mapping[str, MeshPlan]
    limit: int
    current: PlanRecord
    done: list[_Trial] = field(default_factory=list)

    @property
    def fastest(self) -> PlanRecord | None:
        """Return the fastest plan that fits; None if there is none."""
        return min((each.plan for each in self._fitting), key=lambda plan: plan.cost.seconds, default=None)

    @property
    def smallest(self) -> _Trial:
        """Return the trial that needs the least memory."""
        return min(self.done, key=lambda each: each.needed)

    def run(self, found: MeshPlan, plan: PlanRecord) -> None:
        """Compile the plan of the first search, and then the plans of searches with corrected limits.

        If none of these fits, compile the baselines too, and then plans that leave the step to the compiler.
        """
        self._try([(found.prepared, found.candidate.assignment, plan)])
        self._correct(_COMPILATIONS)
        if not self._fitting:
            self._compile_baselines()
            if self._fitting:
                self._correct(len(self.done) + _COMPILATIONS // 2)
        if not self._fitting:
            self._leave_to_compiler()

    def _correct(self, most: int) -> None:
        """Search again with a corrected limit and compile the result, as long as it may be better, up to a number of programs."""
        while len(self.done) < most:
            better = self._search_again()
            if better is None:
                return
            self._try([better])

    def _compile_baselines(self) -> None:
        """Compile the baselines that may fit, the smallest by prediction first."""
        found = sorted(self.baselines.values(), key=lambda each: each.candidate.memory)
        self._try_in_turn((each.prepared, each.candidate.assignment, self.write(each)) for each in found)

    def _leave_to_compiler(self) -> None:
        """Compile plans that leave the step to the compiler.

        Plans with the stored layouts of FSDP are always tried: layouts inside of the step made a RegNet take twice the memory.
        The next ones are tried if a plan nearly fits, whatever is predicted for such layouts inside of the step. For a VAE on
        GPUs this was 3.7 times the limit, and 4.5 times for a GPT-2 with Adafactor, and the compiler made them fit.
        """
        layouts = list(stored_layouts(self.baselines))
        first = 2 if self._nearly_fits() else 1
        # XLA aborts for some layouts that it chooses; others may compile.
        self._try(self._possible(self._write_left(layouts[:first])), passed_over=CompilerFailedError)
        if self._nearly_fits():
            left = self._write_left(layouts[first:]) + self._write_left(split_layouts(self.baselines), forms=1)
            left.sort(key=lambda each: any(leaf.used is not None for leaf in each[2].inputs if leaf.role == "parameters"))
            self._try_in_turn(left, passed_over=CompilerFailedError)

    def _nearly_fits(self) -> bool:
        """Return whether the smallest plan so far is not far above the limit."""
        return bool(self.done) and self.smallest.needed <= _MAY_FIT * self.limit

    def _write_left(self, layouts: Iterable[tuple[PreparedMesh, Assignment]], forms: int = 2) -> list[Candidate]:
        """Write plans that store arguments in the given layouts, and leave the step to the compiler.

        Args:
          forms: 1 leaves out the plans that gather weights at the start of the step.
        """
        return [(*each, plan) for each in layouts for plan in self.write_left(*each)[:forms]]

    def fastest_program(self, faster: MeshPlan | None) -> PlanRecord:
        """Return the plan that fits and whose program costs the least.

        If a baseline was preferred to a plan that is predicted to be `faster`, this is compiled too. If the program of the
        fastest plan costs more than predicted, the compiler added collectives to the planned ones. Layouts with a higher
        prediction may then be faster, so contenders are compiled. Among near-ties, the plan of least predicted cost is returned,
        or else the one that needs the least memory.
        """
        if faster is not None:
            candidate = faster.prepared, faster.candidate.assignment, self.write(faster)
            self._try(self._possible([candidate]), passed_over=CompileError)
        best = min(self._fitting, key=lambda each: each.plan.cost.seconds)
        if _costs_more_than_predicted(best):
            self._try(self._contenders(best)[:_AT_ONCE], passed_over=CompileError)
        contenders = [each for each in self.done if each.fits and each.plan is not best.plan]
        fastest = min(map(_seconds_of_program, contenders), default=math.inf)
        if fastest > _FASTER * _seconds_of_program(best):
            return best.plan
        near_ties = [each for each in contenders if _FASTER * _seconds_of_program(each) <= fastest]
        first = min(near_ties, key=lambda each: each.needed)
        if first.plan.left_to_compiler:
            return _with_cost_of_program(first).plan
        return replace(first.plan, remarks=(*first.plan.remarks, CHOSEN_BY_PROGRAM))

    def _contenders(self, best: _Trial) -> list[Candidate]:
        """Return plans that are predicted to cost less than the fastest plan's program, if nothing is hidden, by predicted cost.

        They are the baselines, and plans left to the compiler with the stored layouts of the fastest plan, of `stored_layouts`
        and of `split_layouts`. Programs rarely cost less than their predictions.
        """
        cost = _seconds_of_program(best)
        written = [(each.prepared, each.candidate.assignment, self.write(each)) for each in self.baselines.values()]
        others = (*stored_layouts(self.baselines), *split_layouts(self.baselines))
        written += self._write_left([(best.prepared, best.assignment), *others])
        written = [each for each in written if each[2].cost.compute + each[2].cost.communication < cost]
        written.sort(key=lambda each: each[2].cost.seconds)
        return self._possible(written)

    def _possible(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Return the candidates whose arguments fit and whose layouts are new, each of them once."""
        kept: list[Candidate] = []
        for each in candidates:
            if self._is_possible(each[2], kept):
                kept.append(each)
        return kept

    def _try_in_turn(self, candidates: Iterable[Candidate], passed_over: type[CompileError] | tuple[()] = ()) -> None:
        """Compile candidates that may fit, some at once, until one fits and no other is faster."""
        left = iter(candidates)
        while some := self._take(left):
            self._try(some, passed_over)

    def _take(self, candidates: Iterator[Candidate]) -> list[Candidate]:
        """Take candidates that may fit, as many as are compiled at once, and drop the others before them."""
        taken: list[Candidate] = []
        for each in candidates:
            if self._is_promising(each[2]) and self._is_possible(each[2], taken):
                taken.append(each)
            if len(taken) == _AT_ONCE:
                break
        return taken

    def _is_promising(self, plan: PlanRecord) -> bool:
        """Return whether a plan is worth compiling: it may fit, and if another plan fits, it is faster by prediction."""
        if (best := self.fastest) is not None and (plan.cost.seconds >= best.cost.seconds or len(self.done) >= _COMPILATIONS):
            return False
        alike = [each for each in self.done if not each.plan.left_to_compiler]
        ratio = min((each.needed / each.plan.cost.memory.total for each in alike), default=0.0)
        return plan.left_to_compiler or ratio * plan.cost.memory.total <= _MAY_FIT * self.limit

    def _try(self, candidates: Sequence[Candidate], passed_over: type[CompileError] | tuple[()] = ()) -> None:
        """Compile plans, given as decisions and as records.

        Args:
          passed_over: errors of the compiler that are not raised: the plan counts as not tried.
        """
        failed = None
        self.current = candidates[-1][2] if candidates else self.current
        results = self.compile([plan for _, _, plan in candidates]) if candidates else []
        for (prepared, assignment, plan), found in zip(candidates, results, strict=True):
            if isinstance(found, CompilerMemoryError):
                needed = found.needed or max(plan.cost.memory.total, self.limit + 1)
                self.done.append(_Trial(prepared, assignment, plan, needed, fits=False))
            elif isinstance(found, Measured):
                fits = found.memory <= self.limit
                self.done.append(_Trial(prepared, assignment, replace(plan, checked=found), found.memory, fits))
            elif not isinstance(found, passed_over):
                failed = failed or (plan, found)
        if failed is not None:
            self.current, error = failed
            raise error

    @property
    def _fitting(self) -> list[_Trial]:
        """Return the trials that fit. Plans that are left to the compiler have the cost of their programs."""
        return [_with_cost_of_program(each) if each.plan.left_to_compiler else each for each in self.done if each.fits]

    def _search_again(self) -> tuple[PreparedMesh, Assignment, PlanRecord] | None:
        """Return the plan of a search with a corrected limit; None if it was compiled already or cannot be better."""
        too_large = [each for each in self.done if not each.fits]
        within = min(
            (_LIMIT_MARGIN * each.plan.cost.memory.total * min(1.0, self.limit / each.needed) for each in too_large),
            default=math.inf,
        )
        best, proof = self.fastest, self.current.proof
        if best is None and proof is not None and within < proof.memory:
            return None  # it is proved that no layout is predicted to fit
        if best is not None and best.proof is not None:  # after a baseline, which has no proof, smaller plans are searched
            assert best.checked is not None
            # Without the limit, a plan may be faster if this one is near it, or if a baseline is faster.
            if not best.near_limit and all(each.seconds >= best.cost.seconds for each in best.baselines.values()):
                return None
            # Other plans need not exceed their predictions by as much as those that did not fit.
            smallest = min((_LIMIT_MARGIN * each.plan.cost.memory.total for each in too_large), default=math.inf)
            within = min(smallest, best.cost.memory.total * self.limit / max(best.checked.memory, 1))
            if within < _LEAST_RAISE * (best.cost.memory.total if too_large else max(best.cost.memory.total, self.limit)):
                return None
        found = self.search(within)
        prepared, assignment = found.prepared, found.candidate.assignment
        plan = self.write(found)
        slower = best is not None and plan.cost.seconds > _FASTER * best.cost.seconds
        return None if slower or not self._is_possible(plan) else (prepared, assignment, plan)

    def _is_possible(self, plan: PlanRecord, others: Sequence[Candidate] = ()) -> bool:
        """Return whether the arguments of a plan fit, and no plan with the same layouts was compiled or is among others."""

        def layouts(plan: PlanRecord) -> tuple[Any, ...]:
            return plan.mesh_shape, plan.inputs, plan.sharding_constraints, plan.rewriting

        seen = itertools.chain((each.plan for each in self.done), (each[2] for each in others))
        return plan.cost.memory.arguments <= self.limit and all(layouts(each) != layouts(plan) for each in seen)


def _with_cost_of_program(trial: _Trial) -> _Trial:
    """Return a trial whose plan has the cost of its compiled program, if the compiler made one."""
    plan, hardware = trial.plan, trial.prepared.costs.hardware
    return trial if plan.checked is None else replace(trial, plan=with_cost_of(plan, plan.checked, hardware))


def _seconds_of_program(trial: _Trial) -> float:
    """Return the cost of a compiled program, in seconds, if nothing is hidden."""
    return _with_cost_of_program(trial).plan.cost.seconds


def _costs_more_than_predicted(trial: _Trial) -> bool:
    """Return whether a program costs more than predicted, if nothing is hidden."""
    predicted = trial.plan.cost
    return _seconds_of_program(trial) > _MORE_COSTLY * (predicted.compute + predicted.communication)


def warn_unchecked(plan: PlanRecord, reason: str) -> PlanRecord:
    """Warn that a plan was not compiled, and return it."""
    warnings.warn(_describe_unchecked(plan, reason), stacklevel=5)
    return plan


@functools.lru_cache(maxsize=4096)
def _most_shards(
    sizes: tuple[int, ...], fixed: tuple[tuple[str, ...] | None, ...] | None, names: tuple[str, ...], lengths: tuple[int, ...]
) -> int:
    """Return the most devices over which a stored leaf can be sharded. `fixed` has the mesh axes that the user prescribes."""
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


# Plans that store arguments in a layout, and leave the layouts inside of the step to the compiler.


def stored_layouts(baselines: Mapping[str, MeshPlan]) -> Iterator[tuple[PreparedMesh, Assignment]]:
    """Yield the layouts in which people store the arguments of a step that they leave to the compiler.

    They are the layouts of the baselines that shard weights, and all axes on the largest dimension of each leaf.
    """
    for name in (FSDP, MEGATRON, MEGATRON_FSDP):
        if name in baselines:
            prepared = baselines[name].prepared
            yield prepared, baselines[name].candidate.assignment
            if name == FSDP:
                yield prepared, by_largest_dim(prepared.costs, prepared.model, prepared.roles)


def split_layouts(baselines: Mapping[str, MeshPlan]) -> Iterator[tuple[PreparedMesh, Assignment]]:
    """Yield layouts in which some of the mesh axes of FSDP shard each weight, and the others the batch."""
    if FSDP in baselines:
        prepared = baselines[FSDP].prepared
        for assignment in split_storage(prepared.costs, prepared.model, prepared.roles):
            yield prepared, assignment


def leave_to_compiler(plan: PlanRecord, prepared: PreparedMesh, assignment: Assignment) -> list[PlanRecord]:
    """Return a plan without its layouts inside of the step, and the same with weights gathered at the start of the step.

    The rows of the batch are stored sharded over all axes. In both plans, they are gathered at the start over the axes that do
    not shard the batch inside of the step.
    """
    rows = _axes_of_rows(prepared, assignment)
    made: list[PlanRecord] = []
    for gathered in (False, True):
        inputs = tuple(_leaf_at_start(leaf, rows, gathered) for leaf in plan.inputs)
        at_start = tuple(None if leaf.used == leaf.stored else leaf.used for leaf in inputs)
        constraints = ShardingConstraints(at_start=at_start)
        if all(constraints != each.sharding_constraints for each in made):
            remarks = (*plan.remarks, LEFT_TO_COMPILER)
            made.append(replace(plan, inputs=inputs, sharding_constraints=constraints, remarks=remarks))
    return made


def _axes_of_rows(prepared: PreparedMesh, assignment: Assignment) -> set[str]:
    """Return the mesh axes that shard the batch inside of the step."""
    costs, axes = prepared.costs, 0
    for node, dims in find_batch_dims(costs.graph, prepared.batch).items():
        if node not in costs.pinned:
            axes |= union(tuple(assignment[node][dim] for dim in dims))
    return set(costs.links.axes(axes))


def _leaf_at_start(leaf: LeafLayout, rows: set[str], gathered: bool) -> LeafLayout:
    """Return a leaf whose layout in use is its layout from the start of the step; None where the compiler chooses it."""
    if leaf.role == "batch":
        return replace(leaf, used=tuple(tuple(axis for axis in entry if axis in rows) for entry in leaf.stored))
    return leaf if gathered and leaf.role == "parameters" else replace(leaf, used=None)


def with_cost_of(plan: PlanRecord, measured: Measured, hardware: Hardware) -> PlanRecord:
    """Return a plan with the cost of its compiled program, by the same model as a predicted one. Nothing is hidden."""
    links = MeshLinks.of(plan.mesh_shape, hardware)
    totals: dict[tuple[str, tuple[str, ...]], list[float]] = {}  # count, bytes on wire and seconds
    for each in measured.collectives:
        sent = each.bytes_on_wire * each.count
        bandwidth, latency = speed_of(links, each)
        seconds = sent_times(each.kind, hardware.reduce_scatters) * sent / bandwidth + latency * each.count
        total = totals.get((each.kind, each.axes), [0.0, 0.0, 0.0])
        totals[each.kind, each.axes] = [total[0] + each.count, total[1] + sent, total[2] + seconds]
    collectives = [
        PlannedCollective(kind, axes, count, sent, seconds, hidden=0.0) for (kind, axes), (count, sent, seconds) in totals.items()
    ]
    work = measured.flops / plan.cost.flops if plan.cost.flops else 1.0
    # Count added FLOPs at the peak, and keep the predicted memory traffic.
    added = plan.cost.flops_seconds * (work - 1.0)
    cost = replace(
        plan.cost,
        compute=max(0.0, plan.cost.compute + added),
        flops=measured.flops,
        flops_seconds=plan.cost.flops_seconds * work,
        collectives=tuple(sorted(collectives, key=lambda each: -each.seconds)),
        memory=replace(plan.cost.memory, activations=max(0, measured.memory - plan.cost.memory.arguments - measured.constants)),
        unknown=(*plan.cost.unknown, *measured.unknown),
    )
    return replace(plan, cost=cost, checked=measured)


# Messages of errors and warnings.


def _describe_arguments(prepared: PreparedMesh, sizes: Sequence[float], traced: TracedStep, limit: int, advice: str) -> str:
    """Describe that the stored arguments and the constants alone exceed the limit in any layout.

    Args:
      sizes: the fewest bytes of each stored argument.
      advice: what would help, if that is known.
    """
    least, devices = sum(sizes) + traced.constant_bytes, math.prod(prepared.mesh_shape.values())
    return (
        f"no layout fits {format_bytes(limit)} a device on mesh {describe_mesh(prepared.mesh_shape)}: the arguments"
        f"{' and constants' if traced.constants else ''} alone take "
        f"{format_bytes(least)} if each is sharded as far as it divides, {format_bytes(least - limit)} too much. The largest on "
        f"each device: {'; '.join(_name_largest(sizes, traced))}. {_about_constants(traced)}"
        f"{advice or f'More than {devices} devices, or arguments of a smaller dtype, would help'}."
    )


def _describe_excess(trial: _Trial, traced: TracedStep, compiler: Compiler, count: int, proof: Proof | None, advice: str) -> str:
    """Describe by how much the smallest of `count` compiled plans exceeds the limit, and which arrays take the most memory.

    Args:
      proof: of the search within the limit.
      advice: what would help, if that is known.
    """
    prepared, assignment, plan, needed = trial.prepared, trial.assignment, trial.plan, trial.needed
    # The activations of a plan that is left to the compiler are not predicted.
    predicted = "" if plan.left_to_compiler else _describe_prediction(prepared, assignment, plan, traced)
    least = math.floor(proof.memory) if proof is not None else 0
    none_fits = plan.limit < least <= needed  # the compiler has not shown that the estimate is too high
    proved = f"by the estimate, every layout needs at least {format_bytes(least)} (proved); " if none_fits else ""
    mesh = describe_mesh(plan.mesh_shape)
    return (
        f"no layout {'' if none_fits else 'that was found '}fits {format_bytes(plan.limit)} a device on mesh {mesh}: {proved}of "
        f"{counted(count, 'plan')} that {compiler.name} compiled, the smallest needs {format_bytes(needed)}, "
        f"{format_bytes(needed - plan.limit)} too much; {format_bytes(plan.cost.memory.arguments)} of it are arguments. "
        f"The largest on each device: {'; '.join(_largest_arguments(prepared, assignment, traced))}. "
        f"{_about_constants(traced)}{predicted}"
        f"{advice or f'More than {plan.device_count} devices, a smaller batch, or jax.checkpoint around each layer would help'}."
        f"{f' Note that {compiler.remark}.' if compiler.remark else ''}"
    )


def _describe_unchecked(plan: PlanRecord, reason: str) -> str:
    """Describe that a plan was not compiled, although it is near its limit or `check` asked for it, with the reason."""
    needs = plan.cost.memory.total
    share = f"{format_bytes(needs - plan.limit)} more than" if needs > plan.limit else f"{format_share(needs, plan.limit)} of"
    doubt = "the plan may not fit, or a faster one may" if plan.near_limit else "the plan likely fits, and another may be faster"
    lines = reason.splitlines() or [""]
    padded = f", or up to {format_bytes(plan.padded)} if a TPU pads arrays of short rows" if plan.padded > needs else ""
    words = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"
    return (
        f"{UNCHECKED}: it is predicted to need {format_bytes(needs)}, {share} its limit{padded}, and {words[:400]}. "
        "Most predictions are within 10% of the compiler's figure, and the worst that were measured are half and twice it: "
        f"{doubt}"
    )


def describe_constants(traced: TracedStep) -> str | None:
    """Return a sentence about the arrays that a step closes over; None if there are none, or small ones."""
    constants = traced.constants
    if not constants:
        return None
    lines = [describe_source(constant.sources) for constant in constants[:_MOST_NAMED]]
    each = [
        f"{format_bytes(constant.bytes)} of {format_type(constant)}{f' read at {line}' if line else ''}"
        for constant, line in zip(constants, lines, strict=False)
    ]
    if len(constants) > len(each):
        each.append(f"{len(constants) - len(each)} more")
    return (
        f"the step closes over {format_bytes(traced.constant_bytes)} of arrays, which every device holds whole: "
        f"{'; '.join(each)}; pass them as an argument of the step, so that they can be sharded"
    )


def _about_constants(traced: TracedStep) -> str:
    """Return `describe_constants` as a sentence of a message; "" if it says nothing."""
    sentence = describe_constants(traced)
    return "" if sentence is None else f"{sentence[0].upper()}{sentence[1:]}. "


def _describe_prediction(prepared: PreparedMesh, assignment: Assignment, plan: PlanRecord, traced: TracedStep) -> str:
    """Describe the predicted memory of a plan, with a TPU's vector memory, and the activations that take the most of both."""
    held = prepared.costs.vector_memory(assignment)
    also = f", and {format_bytes(held)} of the chip's vector memory" if held else ""
    activations = "; ".join(_largest_activations(prepared, assignment, traced))
    largest = f". The largest activations of this prediction: {activations}" if activations else ""
    return f"It was predicted to need {format_bytes(plan.cost.memory.total)}{also}{largest}. "


def _largest_arguments(prepared: PreparedMesh, assignment: Assignment, traced: TracedStep) -> list[str]:
    """Return the arguments that take the most memory of a device, in words."""
    costs = prepared.costs
    return _name_largest([costs.stored_bytes(node, size, assignment[node]) for node, size in costs.stored], traced)


def _name_largest(sizes: Sequence[float], traced: TracedStep) -> list[str]:
    """Return the largest arguments in words, given the bytes of each on a device."""
    stored = sorted(zip(sizes, traced.inputs, strict=True), key=lambda each: -each[0])
    return [f"{format_bytes(size)} of {leaf.path!r} {format_type(leaf)}" for size, leaf in stored[:_MOST_NAMED]]


def _largest_activations(prepared: PreparedMesh, assignment: Assignment, traced: TracedStep) -> list[str]:
    """Return the activations that take the most memory of a device at the peak, in words, each with the line that makes it.

    A value, its other shapes and its resharded copies are one activation. Activations of one shape that one line makes, as in all
    layers, are named together.
    """
    program, costs = prepared.model.program, prepared.costs
    roots = _find_roots(program)
    makers = _find_makers(program, roots)
    arguments = dict(zip(program.inputs, traced.inputs, strict=True))
    bytes_of: dict[int, float] = defaultdict(float)
    for value, size in live_values_at_peak(costs, assignment):
        bytes_of[roots.get(value, value)] += size
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for value, size in bytes_of.items():
        name = f"a copy of {arguments[value].path!r}" if value in arguments else "an activation"
        line = describe_source(makers[value].sources) if value in makers else ""
        array = format_type(program.values[value])
        found[name, f"{array}{f' made at {line}' if line else ''}"].append(size)
    largest = sorted(found.items(), key=lambda each: -sum(each[1]))[:_MOST_NAMED]
    return [
        f"{format_bytes(sum(sizes))} of {name if len(sizes) == 1 else f'{len(sizes)} activations'} {rest}"
        for (name, rest), sizes in largest
    ]


def _find_roots(program: FlatProgram) -> dict[int, int]:
    """Return, for each value that has the elements of another value in another shape or order, this other value."""
    roots: dict[int, int] = {}
    for op in program.ops:
        if op.primitive in ALIASES:
            for operand, result in zip(op.operands, op.results, strict=False):
                if operand is not None:
                    roots[result] = roots.get(operand, operand)
    return roots


def _find_makers(program: FlatProgram, roots: Mapping[int, int]) -> dict[int, Op]:
    """Return the operation that makes each value. The results of loops and branches are made inside of them."""
    makers = {result: op for op in program.ops for result in op.results}
    pairs = [pair for loop in program.loops for pair in loop.stacks]
    pairs += [(carry.after, value) for loop in program.loops for carry in loop.carries for value in (carry.before, carry.result)]
    pairs += [(inside, outside) for each in program.conditionals for inside, outside, _ in each.results]
    for inside, outside in pairs:
        if inside is not None and (maker := makers.get(roots.get(inside, inside))) is not None:
            makers.setdefault(outside, maker)
    return makers
