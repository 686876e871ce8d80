"""Say in words how a run was measured: one paragraph for each design, how often was repeated, and what was verified."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from penstock_bench.outcome import Outcome, Run

_MANY_FAULTS = 10e3  # in a second of the processor: at 3 µs, as we measured for one, 3 % of a variant's time


def method(run: Run) -> list[str]:
    """Return a paragraph on how times were measured, and one for each method of scoring."""
    timed = [outcome for outcome in run.outcomes if outcome.samples and not outcome.workload.scored]
    scored = dict.fromkeys(outcome.workload.method for outcome in run.outcomes if outcome.workload.method)
    if not timed:
        return list(scored)
    live = [outcome for outcome in timed if outcome.live]
    sliced = [outcome for outcome in live if any(block.slices > 1 for block in outcome.blocks)]
    alone = [outcome for outcome in timed if not outcome.live]
    return [
        *([_live_method(run, live, only=not alone)] if live else []),
        *([_sliced_method(sliced, only=len(sliced) == len(timed))] if sliced else []),
        *map(_repeated, live),
        *_faulting(live),
        *([_alone_method(run, alone, only=not live)] if alone else []),
        *_verified(timed),
        *scored,
    ]


def _live_method(run: Run, live: Sequence[Outcome], only: bool) -> str:
    """Say how live pairs were measured."""
    return (
        f"{'' if only else _names(live) + ': '}Live pairs. In each of {_rounds(live)}, every variant was started in a fresh "
        "process and warmed up; then the processes took turns, one at a time, each with a block of about "
        f"{_several(sorted({outcome.workload.block_seconds for outcome in live}))} s or one step, in the order of Williams "
        f"squares (seed {run.seed}). Ratios are of blocks of one turn. A round gives one number, the robust location of its "
        "turns. Intervals and p-values are Student's over rounds, so they hold for processes that are yet to start; p-values are "
        "corrected by Holm over the report. docs/measuring.md says why."
    )


def _sliced_method(sliced: Sequence[Outcome], only: bool) -> str:
    """Say that the blocks of a turn ran at the same time."""
    milliseconds = sorted({1e3 * (outcome.workload.slice_seconds or 0.0) for outcome in sliced})
    return (
        f"{'' if only else _names(sliced) + ': '}The blocks of a turn ran at the same time in slices of {_several(milliseconds)} "
        "ms: one process worked, and the others were stopped, also in the middle of a step. So a burst in which others take the "
        "machine's time hits all variants. The time for which a process was stopped does not count."
    )


def _repeated(outcome: Outcome) -> str:
    """Say how often a workload was repeated at each level, and why."""
    turns = Counter(block.round for block in outcome.blocks if block.position == 0)
    metrics = len(outcome.workload.metrics)
    counts = sorted({count // metrics for count in turns.values()})
    said = f"{outcome.workload.name}: {_rounds([outcome])} of {_several(counts)} turn{'s' * (counts != [1])}"
    plan = outcome.repetition
    if plan is None:
        return f"{said}."
    between = f"{plan.between * 100:.2g} % {'(assumed)' if plan.assumed else 'from round to round for good'}"
    return (
        f"{said}. The ratio of two blocks scatters by {plan.within * 100:.2g} % from turn to turn and by {between}. A start "
        f"takes {plan.starting:.3g} s and a turn {plan.turning:.3g} s, so rounds of {plan.turns} turns are best (Kalibera and "
        "Jones 2013)."
    )


def _faulting(live: Sequence[Outcome]) -> list[str]:
    """Name the variants that get memory from the system all the time: what that costs depends on the other variants."""
    cpu, faults = defaultdict[str, float](float), Counter[str]()
    for block in (block for outcome in live for block in outcome.blocks):
        if block.cpu is not None and block.faults is not None:
            cpu[block.variant] += block.cpu
            faults[block.variant] += block.faults
    many = {name: faults[name] / seconds for name, seconds in cpu.items() if seconds and faults[name] > _MANY_FAULTS * seconds}
    if not many:
        return []
    counts = "; ".join(f"{name}: {per_second / 1e3:.2g} thousand" for name, per_second in many.items())
    return [
        f"Page faults in a second of the processor. {counts}. These variants get memory from the system again and again. A page "
        "fault takes longer where much memory is in use, on a virtual machine above all, and here the other variants use some, "
        "too. So these variants may be faster alone, and they scatter more. An allocator that keeps memory (penstock run) avoids "
        "page faults."
    ]


def _alone_method(run: Run, alone: Sequence[Outcome], only: bool) -> str:
    """Say how variants were measured that ran one after the other."""
    return (
        f"{'' if only else _names(alone) + ': '}Each variant ran alone in a fresh process in each of {_rounds(alone)}, in a "
        f"shuffled order (seed {run.seed}, every second round backwards). Where steps are timed, a run's number is the median of "
        "them without warm-up and, of ten or more, without their first and last tenth; where stalls count, as with a loader, it "
        "is their mean. Ratios are 20 % trimmed means over rounds, with bootstrap intervals over rounds; p-values are Yuen's, "
        "corrected by Holm over the report. docs/measuring.md says why."
    )


def _verified(timed: Sequence[Outcome]) -> list[str]:
    """Say what was verified, for each different text, and for which workloads nothing was."""
    found: dict[str, list[Outcome]] = {}
    for outcome in timed:
        agreement = outcome.workload.agreement
        texts = [f"equal {', '.join(agreement.tolerances)} before anything was timed"] if agreement else []
        texts += [outcome.workload.verifies] if outcome.workload.verifies else []
        found.setdefault("; ".join(texts), []).append(outcome)
    nothing = "nothing was verified: the variants may do different things."
    said = {text: f"verified, outside of the timed part: {text}." if text else nothing for text in found}
    return [(_names(outcomes) + ": " if len(found) > 1 else "") + said[text] for text, outcomes in found.items()]


def _names(outcomes: Sequence[Outcome]) -> str:
    return ", ".join(outcome.workload.name for outcome in outcomes)


def _rounds(outcomes: Sequence[Outcome]) -> str:
    counts = sorted({outcome.rounds for outcome in outcomes})
    return "1 round" if counts == [1] else f"{_several(counts)} rounds"


def _several(counts: Sequence[float]) -> str:
    """Return a number, or the smallest and the largest of several."""
    return " to ".join(dict.fromkeys(f"{count:g}" for count in (counts[0], counts[-1]))) if counts else "0"
