"""Find steps that compute gradients and lose them, as a train step does that forgets to return the new parameters."""

from __future__ import annotations

from collections import deque
from typing import Any

from penstock.shard.trace.flat_program import INLINED, Path
from penstock.shard.trace.step import TracedStep


def describe_lost_gradients(traced: TracedStep) -> str | None:
    """Return a sentence about a step that computes gradients and does not train; None if it uses them.

    It uses them if its state depends on them, or an array among its other results. A scalar result, such as the norm of the
    gradients, counts only in a step without state: that is an evaluation, of a gradient penalty for example.

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
        return None
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
    dependent = [index for index, value in enumerate(program.outputs) if value in reached]
    if any(not traced.state or index in traced.state or traced.outputs[index].shape for index in dependent):
        return None
    return (
        f"the step computes gradients, and {'only scalars' if dependent else 'no results'} that it returns depend on them, so it "
        "does not train: return the new parameters and optimizer state, or take the gradients out"
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
