"""Say why no plan fits, or why one is unchecked: the bytes that are missing, and what takes the most memory.

In: the plan of least memory, its mesh with the search problem, and the step. Out: the messages of `PlanError` and of warnings.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock._bytes import counted, format_bytes
from penstock._jax import source_frames
from penstock.shard.compiler import Compiler
from penstock.shard.graph.primitives import ALIASES
from penstock.shard.mesh.shapes import describe_mesh
from penstock.shard.record import PlanRecord
from penstock.shard.search.cost import largest_live_values
from penstock.shard.search.cost_model import Assignment
from penstock.shard.search.mesh_search import PreparedMesh
from penstock.shard.trace.flat_program import FlatProgram, Op
from penstock.shard.trace.step import TracedStep
from penstock.shard.units import format_share

UNCHECKED = "the plan is unchecked"
"""The first words of the warning about a plan that is not known to fit."""
_MOST_NAMED = 3
"""The most arguments, and the most activations, that a message names."""


def describe_arguments(prepared: PreparedMesh, assignment: Assignment, traced: TracedStep, limit: int, least: float) -> str:
    """Describe that the stored arguments alone exceed the limit, whatever the layout.

    Args:
      prepared: the mesh, with its search problem.
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
    held = prepared.problem.vector_memory(assignment)
    also = f", and {format_bytes(held)} of the chip's vector memory" if held else ""
    activations = "; ".join(_largest_activations(prepared, assignment, traced))
    largest = f". The largest activations of this prediction: {activations}" if activations else ""
    return f"It was predicted to need {format_bytes(plan.cost.memory.total)}{also}{largest}. "


def _largest_arguments(prepared: PreparedMesh, assignment: Assignment, traced: TracedStep) -> list[str]:
    """Return the arguments that take the most memory of a device, in words."""
    problem = prepared.problem
    stored = sorted(
        (
            (problem.stored_bytes(node, size, assignment[node]), leaf)
            for leaf, (node, size) in zip(traced.inputs, problem.stored, strict=True)
        ),
        key=lambda each: -each[0],
    )
    return [f"{format_bytes(size)} of {leaf.path!r} {leaf.dtype}{list(leaf.shape)}" for size, leaf in stored[:_MOST_NAMED]]


def _largest_activations(prepared: PreparedMesh, assignment: Assignment, traced: TracedStep) -> list[str]:
    """Return the activations that take the most memory of a device at the peak, in words, each with the line that makes it.

    A value, its other shapes and its resharded copies are one activation. Activations of one shape that one line makes, as those
    of all layers, are named together.
    """
    program, problem = prepared.model.program, prepared.problem
    roots = _find_roots(program)
    makers = _find_makers(program, roots)
    arguments = dict(zip(program.inputs, traced.inputs, strict=True))
    bytes_of: dict[int, float] = defaultdict(float)
    for value, size in largest_live_values(problem, assignment, len(problem.live_ranges.value)):
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
