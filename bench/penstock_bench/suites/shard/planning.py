"""Plan for a step within a limit of memory: time the search, let the compiler decide, and score the program that it made."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import CompileError, PlanError
from penstock.shard import Hardware, Plan
from penstock.shard.hlo.analysis import Measured
from penstock.shard.hlo.topologies import find_topology
from penstock.shard.mesh.hardware import find_hardware
from penstock.shard.mesh.shapes import describe_mesh
from penstock.shard.planning import plan
from penstock_bench.suites.shard.scores import OwnBaseline, PlanScore, Prediction, Score
from penstock_bench.suites.shard.task import Compiler
from penstock_bench.suites.shard.time_limit import time_limit

_SEARCH_LIMIT = 600.0  # seconds, after which a search is given up
_CHECK_LIMIT = 7200.0  # the same with compilations


@dataclass(frozen=True)
class Asked:
    """A step to plan for.

    Attributes:
      step: state, batch → state, loss.
      state, batch: abstract, or arrays.
      where: the option of `ps.plan` that gives the devices: {"mesh": {"data": 8}}, or {"devices": 64}.
      compiler: the compiler that decides, and the hardware.
      dtype: of the matrix products, for the peak of the hardware.
    """

    step: Callable
    state: Any
    batch: Any
    where: Mapping[str, Any]
    compiler: Compiler
    dtype: str

    def plan(self, memory: int, check: bool | str) -> Plan:
        """Return the plan for a limit in bytes."""
        hardware = hardware_of(self.compiler)
        return plan(self.step, self.state, self.batch, **self.where, hardware=hardware, memory=memory, check=check)

    def score(self, measured: Measured, mesh: Mapping[str, int]) -> Score:
        """Return the compiler's figures on a mesh as a score."""
        return score_of(measured, hardware_of(self.compiler), self.dtype, mesh)


def hardware_of(compiler: Compiler) -> Hardware:
    """Return the hardware to plan for.

    The CPU's compiler does not judge plans for a TPU where the TPU's is installed. So a chip with the speed of a TPU, whose
    programs the CPU's compiler makes, is another hardware, with a name of its own.
    """
    found = find_hardware(compiler.hardware)
    if compiler.topology:
        return find_topology(compiler.topology).place(found)
    return replace(found, name=f"{found.name}, compiled for CPU", platform="cpu")


def search(asked: Asked, memory: int) -> tuple[float, float | None]:
    """Plan for the limit in bytes without compilation: trace and search. Return the seconds, and the proved gap of the plan."""
    gap = None
    begin = time.perf_counter()
    with warnings.catch_warnings(), time_limit(_SEARCH_LIMIT):
        warnings.simplefilter("ignore")  # the compiled plan's warnings are reported
        with contextlib.suppress(PlanError):  # the arguments alone exceed the limit
            gap = asked.plan(memory, check=False).gap
    return time.perf_counter() - begin, gap


def plan_within(asked: Asked, limit: str, memory: int | None) -> tuple[PlanScore, Plan | None]:
    """Plan within a limit, and score the plan; or say why there is no plan, or no score.

    Args:
      limit: its name.
      memory: bytes; None if they are unknown.
    """
    if memory is None:
        return PlanScore(limit, None, reason="data parallel, which sets the limit, has no score"), None
    score = PlanScore(limit, memory)
    made = None
    try:
        planning, gap = search(asked, memory)
        score = replace(score, planning=planning, gap=gap)
        made, score = _checked(asked, memory, score)
        return replace(score, score=asked.score(_measured(made, asked.compiler), made.mesh_shape)), made
    except PlanError as error:
        return replace(score, reason=reason(error, 1000), refused=True), None
    except Exception as error:
        failed = "planning failed" if made is None else "does not compile"
        return replace(score, reason=f"{failed}: {reason(error, 1000)}"), made


def _checked(asked: Asked, memory: int, score: PlanScore) -> tuple[Plan, PlanScore]:
    """Return the plan of which the compiler decides that it fits, and its score so far."""
    begin = time.perf_counter()
    with warnings.catch_warnings(record=True) as warned, time_limit(_CHECK_LIMIT):
        warnings.simplefilter("always")
        made = asked.plan(memory, check=asked.compiler.topology or True)
    return made, replace(
        score,
        checking=time.perf_counter() - begin,
        # The cost of a plan that is left to the compiler is read from the program, and no prediction.
        predicted=None if made.left_to_compiler else _prediction(made),
        mesh=describe_mesh(made.mesh_shape),
        notes=tuple(reason(each.message) for each in warned if issubclass(each.category, UserWarning)),
    )


def _measured(made: Plan, compiler: Compiler) -> Measured:
    """Return the compiler's figures for a plan: those by which it was checked, or new ones where the compiler gave none."""
    return made.checked or made.verify(compiler.topology).measured


def own_baselines(asked: Asked, made: Plan) -> list[OwnBaseline]:
    """Return the planner's own baselines, which it prints beside a plan, as predicted and as compiled.

    A baseline that does not compile, because it needs more memory than the device has, has no figures.
    """
    found = []
    for name, baseline in made.alternatives.items():
        with contextlib.suppress(CompileError):
            measured = baseline.verify(asked.compiler.topology).measured
            found.append(OwnBaseline(name, _prediction(baseline), asked.score(measured, baseline.mesh_shape)))
    return found


def score_of(measured: Measured, on: Hardware, dtype: str, mesh: Mapping[str, int]) -> Score:
    """Return the compiler's measurements as the score of a plan, on a mesh of this hardware."""
    counts: Counter[str] = Counter()
    for each in measured.collectives:
        guessed = " (guessed)" if each.guessed else ""
        counts[f"{each.kind} over {', '.join(each.axes) or 'a part of an axis'}{guessed}"] += round(each.count)
    return Score(
        seconds=measured.seconds(on, dtype, mesh),
        memory=measured.memory,
        arguments=measured.arguments,
        bytes_on_wire=measured.bytes_on_wire,
        flops=measured.flops,
        collectives=tuple(f"{count} {what}" for what, count in counts.most_common()),
        unknown=measured.unknown,
        seconds_with_latency=measured.seconds(on, dtype, mesh, latency=True),
    )


def _prediction(made: Plan) -> Prediction:
    """Return the bytes that the planner predicted."""
    return Prediction(made.cost.memory.arguments, made.cost.memory.total, made.cost.bytes_on_wire)


def reason(error: Exception | Warning | str, most: int = 300) -> str:
    """Return the kind of an error and its text, cut where it is long."""
    text = " ".join(str(error).split())
    kind = "" if isinstance(error, PlanError | CompileError | UserWarning | str) else f"{type(error).__name__}: "
    return kind + (text if len(text) <= most else f"{text[:most]}…")
