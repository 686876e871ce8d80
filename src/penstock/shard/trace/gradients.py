"""Find steps that compute gradients and lose them, as a train step does that forgets to return the new parameters."""

from __future__ import annotations

from collections import deque
from typing import Any

from penstock.shard.trace.flat_program import INLINED, Path
from penstock.shard.trace.step import TracedStep

LOST_GRADIENTS = (
    "the step computes gradients, and neither its state nor any other array that it returns depends on them, so it does not "
    "train: return the new parameters and optimizer state, or take the gradients out"
)


def loses_gradients(traced: TracedStep) -> bool:
    """Return whether a step computes gradients on which neither its state nor an array among its other results depends.

    Scalar results, such as the norm of the gradients, do not count.

    Args:
      traced: the step.
    """
    backward = _backward_paths(traced.closed.jaxpr, ())
    program = traced.program
    reached = {
        result
        for op in program.ops
        if any(op.path[:length] in backward for length in range(1, len(op.path) + 1))
        for result in op.results
    }
    if not reached:
        return False
    uses: dict[int, list[int]] = {}
    for op in program.ops:
        for operand in op.operands:
            if operand is not None:
                uses.setdefault(operand, []).extend(op.results)
    for pair in program.same_sharding:
        uses.setdefault(pair.outer, []).append(pair.inner)
        uses.setdefault(pair.inner, []).append(pair.outer)
    queue = deque(reached)
    while queue:
        for result in uses.get(queue.popleft(), ()):
            if result not in reached:
                reached.add(result)
                queue.append(result)
    return not any(
        value in reached and (index in traced.state or traced.outputs[index].shape) for index, value in enumerate(program.outputs)
    )


def _backward_paths(jaxpr: Any, path: Path) -> set[Path]:
    """Return the paths of the equations of a backward pass, as `FlatProgram` has them; outer ones stand for those in them."""
    found: set[Path] = set()
    for index, equation in enumerate(jaxpr.eqns):
        here = (*path, index)
        name, params = equation.primitive.name, equation.params
        if "transpose(" in str(equation.source_info.name_stack):  # such as transpose(jvp(loss))
            found.add(here)
        elif name == "cond":
            for number, branch in enumerate(params["branches"]):
                found |= _backward_paths(branch.jaxpr, (*here, f"branch{number}"))
        elif name in ("scan", "while"):
            parts = {"jaxpr": "body"} if name == "scan" else {"cond_jaxpr": "cond", "body_jaxpr": "body"}
            for key, part in parts.items():
                found |= _backward_paths(params[key].jaxpr, (*here, part))
        elif name in INLINED and INLINED[name] in params:
            inner = params[INLINED[name]]
            found |= _backward_paths(getattr(inner, "jaxpr", inner), here)
    return found
