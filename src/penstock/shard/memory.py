"""Write plans that store arguments in a layout and leave most of the step to the compiler, as expert users of `jax.jit` do.

In: the baselines, on their meshes, and a plan with its layouts inside of the step. Out: stored layouts, and plans whose layouts
inside of the step the compiler chooses. They cost what the compiled program says, because their collectives are not predicted.

Say why no plan fits, or why one is unchecked: the bytes that are missing, and what takes the most memory.

In: the plan of least memory, its mesh with the search problem, and the step. Out: the messages of `PlanError` and of warnings.

Enforce the memory limit.

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
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock._bytes import counted, format_bytes
from penstock._jax import source_frames
from penstock.errors import CompileError, CompilerFailedError, CompilerMemoryError, PlanError
from penstock.shard.apply.sharding_constraints import ShardingConstraints
from penstock.shard.compiler import Compiler
from penstock.shard.graph.roles import find_batch_dims
from penstock.shard.hlo.analysis import Measured
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.mesh.resharding import sent_times, union
from penstock.shard.mesh.shapes import describe_mesh
from penstock.shard.record import LeafLayout, PlanRecord
from penstock.shard.search.baselines import FSDP, MEGATRON, MEGATRON_FSDP, by_largest_dim, split_storage
from penstock.shard.search.costs import Assignment, PlannedCollective, largest_live_values
from penstock.shard.search.solver import MeshPlan, PreparedMesh
from penstock.shard.trace.flat_program import ALIASES, FlatProgram, Op
from penstock.shard.trace.step import TracedStep
from penstock.shard.wording import format_share

LEFT_TO_COMPILER = (
    "the compiler chooses the layouts inside of the step, because plans that give them do not fit, or are slower once compiled; "
    "the cost is that of the compiled program"
)


def stored_layouts(baselines: Mapping[str, MeshPlan]) -> Iterator[tuple[PreparedMesh, Assignment]]:
    """Yield the layouts in which people store the arguments of a step that they leave to the compiler.

    They are those of the baselines that shard weights; the largest dimension of each leaf; and splits of each weight over some of
    the mesh axes of FSDP, while the others shard the batch.

    Args:
      baselines: the baselines by name, each on its mesh.
    """
    for name in (FSDP, MEGATRON, MEGATRON_FSDP):
        if name in baselines:
            prepared = baselines[name].prepared
            yield prepared, baselines[name].candidate.assignment
            if name == FSDP:
                yield prepared, by_largest_dim(prepared.costs, prepared.model, prepared.roles)
    if FSDP in baselines:
        prepared = baselines[FSDP].prepared
        for assignment in split_storage(prepared.costs, prepared.model, prepared.roles):
            yield prepared, assignment


def leave_to_compiler(plan: PlanRecord, prepared: PreparedMesh, assignment: Assignment) -> list[PlanRecord]:
    """Return a plan without its layouts inside of the step, and the same with weights gathered at the start of the step.

    In both, the rows of the batch, which are stored sharded over all axes, are gathered at the start over those that do not shard
    the batch inside of the step.

    Args:
      plan: the plan.
      prepared, assignment: its mesh and its decisions.
    """
    rows = _axes_of_rows(prepared, assignment)
    made: list[PlanRecord] = []
    for gathered in (False, True):
        inputs = tuple(_brought(leaf, rows, gathered) for leaf in plan.inputs)
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


def _brought(leaf: LeafLayout, rows: set[str], gathered: bool) -> LeafLayout:
    """Return a leaf whose layout in use is that to which it is brought at the start, or None where the compiler chooses it."""
    if leaf.role == "batch":
        return replace(leaf, used=tuple(tuple(axis for axis in entry if axis in rows) for entry in leaf.stored))
    return leaf if gathered and leaf.role == "parameters" else replace(leaf, used=None)


def with_cost_of(plan: PlanRecord, measured: Measured, hardware: Hardware) -> PlanRecord:
    """Return a plan whose cost is that of its compiled program, by the same model as a predicted one. Nothing is hidden.

    Args:
      plan: the plan, with the cost that was predicted for other layouts inside of the step.
      measured: the compiler's figures.
      hardware: the device.
    """
    collectives = []
    for each in measured.collectives:
        sent = each.bytes_on_wire * each.count
        times = sent_times(each.kind, hardware.reduce_scatters)
        seconds = times * sent / hardware.bandwidth(each.axes) + hardware.latency(each.axes) * each.count
        collectives.append(PlannedCollective(each.kind, each.axes, each.count, sent, seconds, hidden=0.0))
    work = measured.flops / plan.cost.flops if plan.cost.flops else 1.0
    # Count added FLOPs at the peak, and keep the predicted memory traffic.
    added = plan.cost.flops_seconds * (work - 1.0)
    cost = replace(
        plan.cost,
        compute=max(0.0, plan.cost.compute + added),
        flops=measured.flops,
        flops_seconds=plan.cost.flops_seconds * work,
        collectives=tuple(sorted(_merged(collectives), key=lambda each: -each.seconds)),
        memory=replace(plan.cost.memory, activations=max(0, measured.memory - plan.cost.memory.arguments)),
        unknown=(*plan.cost.unknown, *measured.unknown),
    )
    return replace(plan, cost=cost, checked=measured)


def _merged(collectives: list[PlannedCollective]) -> list[PlannedCollective]:
    """Return the sums of collectives of one kind over the same axes."""
    totals: dict[tuple[str, tuple[str, ...]], PlannedCollective] = {}
    for each in collectives:
        so_far = totals.get((each.kind, each.axes), replace(each, count=0.0, bytes_on_wire=0.0, seconds=0.0))
        totals[each.kind, each.axes] = replace(
            so_far,
            count=so_far.count + each.count,
            bytes_on_wire=so_far.bytes_on_wire + each.bytes_on_wire,
            seconds=so_far.seconds + each.seconds,
        )
    return list(totals.values())


UNCHECKED = "the plan is unchecked"
"""The first words of the warning about a plan that is not known to fit."""
_MOST_NAMED = 3
"""The most arguments, and the most activations, that a message names."""


def describe_arguments(prepared: PreparedMesh, assignment: Assignment, traced: TracedStep, limit: int, least: float) -> str:
    """Describe that the stored arguments alone exceed the limit, whatever the layout.

    Args:
      prepared: the mesh, with its search costs.
      assignment: the layouts of least memory.
      traced: the step.
      limit: bytes that one device may hold.
      least: the fewest bytes of arguments that any layout has on a device.
    """
    return (
        f"no layout fits {format_bytes(limit)} a device on mesh {describe_mesh(prepared.mesh_shape)}: the arguments alone take "
        f"{format_bytes(least)} if each is sharded as far as it divides, {format_bytes(least - limit)} too much. The largest on "
        f"each device: {'; '.join(_largest_arguments(prepared, assignment, traced))}. "
        f"More than {math.prod(prepared.mesh_shape.values())} devices, or arguments of a smaller dtype, would help."
    )


def describe_excess(
    prepared: PreparedMesh,
    assignment: Assignment,
    plan: PlanRecord,
    needed: float,
    traced: TracedStep,
    compiler: Compiler,
    count: int,
) -> str:
    """Describe by how much the smallest compiled plan exceeds the limit, and what takes the most memory in it.

    Args:
      prepared, assignment, plan: the plan of least memory: its mesh, its layouts, and the same as a record.
      needed: the bytes that it needs, as the compiler says.
      traced: the step.
      compiler: the compiler.
      count: how many plans were compiled.
    """
    # The compiler chooses the activations of a plan that is left to it: nothing is predicted of them.
    predicted = "" if plan.left_to_compiler else _describe_prediction(prepared, assignment, plan, traced)
    return (
        f"no layout that was found fits {format_bytes(plan.limit)} a device on mesh {describe_mesh(plan.mesh_shape)}: of "
        f"{counted(count, 'plan')} that {compiler.name} compiled, the smallest needs {format_bytes(needed)}, "
        f"{format_bytes(needed - plan.limit)} too much; {format_bytes(plan.cost.memory.arguments)} of it are arguments. "
        f"The largest on each device: {'; '.join(_largest_arguments(prepared, assignment, traced))}. {predicted}"
        f"More than {plan.device_count} devices, a smaller batch, or jax.checkpoint around each layer would help."
        f"{f' Note that {compiler.remark}.' if compiler.remark else ''}"
    )


def describe_unchecked(plan: PlanRecord, reason: str) -> str:
    """Describe that a plan was not compiled, although it is near its limit or `check` asked for it.

    Args:
      plan: the plan.
      reason: why it was not, as the end of a sentence.
    """
    needs = plan.cost.memory.total
    share = f"{format_bytes(needs - plan.limit)} more than" if needs > plan.limit else f"{format_share(needs, plan.limit)} of"
    doubt = "the plan may not fit, or a faster one may" if plan.near_limit else "the plan likely fits, and another may be faster"
    lines = reason.splitlines() or [""]
    words = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"
    return (
        f"{UNCHECKED}: it is predicted to need {format_bytes(needs)}, {share} its limit, and {words[:400]}. "
        "Most predictions are within 10% of the compiler's figure, and the worst that were measured are half and twice it: "
        f"{doubt}"
    )


def _describe_prediction(prepared: PreparedMesh, assignment: Assignment, plan: PlanRecord, traced: TracedStep) -> str:
    """Describe the memory that a plan was predicted to need, and the activations that take the most of it.

    The vector memory of a TPU counts here too, because some of these activations are in it.
    """
    held = prepared.costs.vector_memory(assignment)
    also = f", and {format_bytes(held)} of the chip's vector memory" if held else ""
    activations = "; ".join(_largest_activations(prepared, assignment, traced))
    largest = f". The largest activations of this prediction: {activations}" if activations else ""
    return f"It was predicted to need {format_bytes(plan.cost.memory.total)}{also}{largest}. "


def _largest_arguments(prepared: PreparedMesh, assignment: Assignment, traced: TracedStep) -> list[str]:
    """Return the arguments that take the most memory of a device, in words."""
    costs = prepared.costs
    stored = sorted(
        (
            (costs.stored_bytes(node, size, assignment[node]), leaf)
            for leaf, (node, size) in zip(traced.inputs, costs.stored, strict=True)
        ),
        key=lambda each: -each[0],
    )
    return [f"{format_bytes(size)} of {leaf.path!r} {leaf.dtype}{list(leaf.shape)}" for size, leaf in stored[:_MOST_NAMED]]


def _largest_activations(prepared: PreparedMesh, assignment: Assignment, traced: TracedStep) -> list[str]:
    """Return the activations that take the most memory of a device at the peak, in words, each with the line that makes it.

    A value, its other shapes and its resharded copies are one activation. Activations of one shape that one line makes, as those
    of all layers, are named together.
    """
    program, costs = prepared.model.program, prepared.costs
    roots = _find_roots(program)
    makers = _find_makers(program, roots)
    arguments = dict(zip(program.inputs, traced.inputs, strict=True))
    bytes_of: dict[int, float] = defaultdict(float)
    for value, size in largest_live_values(costs, assignment, len(costs.live_ranges.value)):
        bytes_of[roots.get(value, value)] += size
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for value, size in bytes_of.items():
        name = f"a copy of {arguments[value].path!r}" if value in arguments else "an activation"
        line = describe_source(makers[value].sources) if value in makers else ""
        array = f"{program.values[value].dtype}{list(program.values[value].shape)}"
        found[name, f"{array}{f' made at {line}' if line else ''}"].append(size)
    largest = sorted(found.items(), key=lambda each: -sum(each[1]))[:_MOST_NAMED]
    return [
        f"{format_bytes(sum(sizes))} of {name if len(sizes) == 1 else f'{len(sizes)} activations'} {rest}"
        for (name, rest), sizes in largest
    ]


def _find_roots(program: FlatProgram) -> dict[int, int]:
    """Return, for each value that is another one in another shape or order, that other value."""
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


_TRACING = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parent / "trace", Path(__file__).parents[1] / "keras"))
"""The folders of the code that calls the step. Frames further out are not part of the step."""
_TRANSFORMATIONS = re.compile(r"\b(?:jvp|transpose|vmap|checkpoint|rematted_computation)\(|\)")
"""The names that JAX adds to those of scopes."""
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Parts of the paths of files that belong to installed packages."""


def describe_source(sources: Sequence[Any]) -> str:
    """Return the line that makes an operation: "model.py:42 (block)".

    A line of an installed package is followed by the line of the user's code that calls the package. If there is none, as for the
    layers of Keras, the name of the scope follows, which is the path of the layer.

    Args:
      sources: where the equation was traced, then where those around it were. JAX cuts the first off at the call of a jitted
        function, where the next continues.

    Returns:
      The text; "" if the line is unknown.
    """
    frames = [frame for source in sources for frame in _frames_of_step(source)]
    if not frames:
        return ""
    own = next((frame for frame in frames if not _is_installed(frame)), None)
    line = _describe(frames[0])
    if own is None:
        scope = _TRANSFORMATIONS.sub("", str(sources[0].name_stack))
        return f"{line}, in {scope!r}" if scope else line
    return line if own == frames[0] else f"{line}, called from {_describe(own)}"


def _frames_of_step(source: Any) -> list[tuple[str, int, str]]:
    """Return the frames of an equation inside of the step, the innermost first."""
    frames = source_frames(source)
    end = next((at for at, (file, _, _) in enumerate(frames) if file.startswith(_TRACING)), len(frames))
    return frames[:end]


def _is_installed(frame: tuple[str, int, str]) -> bool:
    """Return whether a frame is in an installed package."""
    return any(part in frame[0] for part in _INSTALLED)


def _describe(frame: tuple[str, int, str]) -> str:
    """Return a frame as text."""
    file, line, function = frame
    return f"{os.path.basename(file)}:{line} ({function})"


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
      prepared: the mesh, with its search costs.
    """
    costs = prepared.costs
    names, lengths, nodes = costs.links.names, costs.links.sizes, costs.graph.nodes
    return sum(size / _most_shards(nodes[node].sizes, nodes[node].fixed, names, lengths) for node, size in costs.stored)


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
    plan, hardware = trial.plan, trial.prepared.costs.hardware
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
