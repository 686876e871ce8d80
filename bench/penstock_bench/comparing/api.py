"""Compare functions from Python: `penstock_bench.compare`."""

from __future__ import annotations

import inspect
import io
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock_bench.comparing.specification import Specification
from penstock_bench.comparing.workload import workload_of
from penstock_bench.process import IN_WORKER


@dataclass(frozen=True)
class Result:
    """The result of a comparison. Printed, it is the report of the terminal.

    Attributes:
      run: all that was measured, as in `penstock_bench.outcome`.
      sentences: for the A/A control and for each function after the first: how it compares, and what could have been shown.
        Before them, if the time was too short, one that says so.
      ratios: from a function's name to its time over the first one's, and the ends of the 95 % interval, which are None where too
        little was measured. Empty if the time was too short for one round.
    """

    run: Any
    sentences: tuple[str, ...]
    ratios: Mapping[str, tuple[float, float | None, float | None]]

    def __str__(self) -> str:
        from rich.console import Console

        from penstock_bench.report import print_report

        text = io.StringIO()
        print_report(Console(file=text, width=120), self.run)
        return text.getvalue()

    def write(self, html: Path | None = None, json: Path | None = None, markdown: Path | None = None) -> None:
        """Write the report as one page, as JSON, or as Markdown."""
        from penstock_bench.measurement import ReportFiles

        ReportFiles(*(Path(path) if path else None for path in (json, markdown, html))).write(self.run)


def compare(
    functions: Mapping[str, Callable[..., Any]],
    make_inputs: Callable[[], Any] | None = None,
    *,
    minutes: float = 1.0,
    tolerance: float | None = 1e-3,
    block_seconds: float = 0.3,
) -> Result:
    """Compare the time of functions, in warm processes of their own that take turns.

    Results of JAX are waited for. A function that donates its first argument gets its result, or the first part of it, in the
    next call. The functions are imported again in each process, so they are at the top level of a file, and a script calls
    `compare` under `if __name__ == "__main__":`.

    Args:
      functions: from a name to a function; the others are divided by the first one.
      make_inputs: returns a tuple of arguments, or the only argument; None for functions without arguments.
      minutes: the time for all of it.
      tolerance: the largest relative difference of the results that is accepted; None to compare no results.
      block_seconds: the length of a turn.

    Returns:
      The result; print it for the whole report.

    Raises:
      ValueError: there are fewer than two functions, or one cannot be imported from a file.
      RuntimeError: a function failed, or its results differ from the first one's. Or this is a process that is measured: the
        file calls `compare` when it is imported.

    Examples:
      ```python
      result = penstock_bench.compare({"a": step_a, "b": step_b}, make_inputs)
      print(result)
      ```
    """
    from penstock_bench.budget import Budget
    from penstock_bench.levels import FEWEST_ROUNDS
    from penstock_bench.measurement import measure
    from penstock_bench.suites import COMPARISON
    from penstock_bench.verdict import judge
    from penstock_bench.wording import claim_text

    if os.environ.get(IN_WORKER):
        raise RuntimeError(
            "compare() was called while its file was imported to be measured: call it under if __name__ == '__main__':"
        )
    if len(functions) < 2:
        raise ValueError(f"{len(functions)} function is no comparison: name two, which may be the same")
    variants = {name: reference_of(name, function) for name, function in functions.items()}
    inputs = reference_of("make_inputs", make_inputs) if make_inputs is not None else ""
    specification = Specification("functions", variants, inputs, tolerance, block_seconds)
    chosen = [(f"{COMPARISON}{specification.as_text()}", workload_of(specification))]
    run, interrupted = measure("compare", chosen, "full", Budget(FEWEST_ROUNDS, minutes, None, fills=True))
    if interrupted:
        raise KeyboardInterrupt
    (outcome,), (claims,) = run.outcomes, judge(run).claims
    if outcome.failures:
        reasons = "; ".join(f"{failure.variant}: {failure.reason}" for failure in outcome.failures)
        raise RuntimeError(f"{reasons}\n{outcome.failures[0].output}".strip())
    ratios = {
        claim.variant: (claim.comparison.ratio or 0.0, claim.comparison.low, claim.comparison.high)
        for claim in claims
        if not claim.control
    }
    sentences = [*([run.partial] if run.partial else []), *(claim_text(outcome, claim) for claim in claims)]
    return Result(run, tuple(sentences), ratios)


def reference_of(name: str, function: Callable[..., Any]) -> str:
    """Return FILE.py:NAME for a function.

    Raises:
      ValueError: a new process could not import it by that.
    """
    module, attribute = sys.modules.get(getattr(function, "__module__", "") or ""), getattr(function, "__qualname__", "")
    file = getattr(module, "__file__", None)
    if file is None or getattr(module, attribute, None) is not function:
        what = "a lambda" if getattr(function, "__name__", "") == "<lambda>" else repr(function)
        raise ValueError(
            f"{name} is {what}, which a new process cannot import: define it with a name at the top level of a .py file"
        )
    return f"{inspect.getfile(module) if module else file}:{attribute}"
