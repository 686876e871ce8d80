"""A run as tables on the terminal, as Markdown, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.bench.model import Failure, Metric, Outcome, Run
from penstock.bench.summary import Row, Verdict, rows, verdicts

_QUICK = "Quick sizes: these numbers show that all works, not how fast it is. The targets are for the full sizes."


@dataclass(frozen=True)
class _Section:
    """The table of one metric, as text; the first column names the variants."""

    title: str
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]


def print_outcome(console: Console, outcome: Outcome) -> None:
    """Print the tables of one workload, its targets, and what is missing from them and why."""
    for section in _sections(outcome):
        table = Table(title=escape(section.title), title_justify="left", title_style="bold", min_width=60)
        for number, column in enumerate(section.columns):
            table.add_column(escape(column), justify="right" if number else "left")
        for cells in section.cells:
            table.add_row(*map(escape, cells))
        console.print(table)
    for verdict in verdicts(outcome):
        style = {True: "green", False: "red", None: "yellow"}[verdict.met]
        console.print(_target_text(outcome, verdict), style=style, markup=False, highlight=False)
    for line in _absences(outcome):
        console.print(line, style="yellow", markup=False, highlight=False)
    remarks = [*_notes(outcome), *map(_tail, outcome.failures), *([_QUICK] if outcome.size == "quick" else [])]
    for line in remarks:
        console.print(line, style="dim", markup=False, highlight=False)
    console.print()


def print_closing(console: Console, run: Run) -> None:
    """Print what the numbers were measured on, and how."""
    for line in (*_machine_lines(run), _method(run)):
        console.print(line, style="dim", markup=False, highlight=False)


def as_markdown(run: Run) -> str:
    """The tables as Markdown that names the machine."""
    lines = [f"# penstock bench {run.suite}", "", *[f"- {line}" for line in _machine_lines(run)], "", _method(run), ""]
    if run.size == "quick":
        lines += [f"**{_QUICK}**", ""]
    for outcome in run.outcomes:
        lines += [f"## {outcome.workload.name}", ""]
        for section in _sections(outcome):
            lines += [section.title, "", *_markdown_table(section), ""]
        lines += [f"- {_target_text(outcome, verdict)}" for verdict in verdicts(outcome)]
        lines += [f"- {line}" for line in (*_absences(outcome), *_notes(outcome))]
        for failure in outcome.failures:
            lines += ["", "```text", _tail(failure), "```"]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def as_json(run: Run) -> str:
    """Everything: each sample in the order of running, what was made of them, and the machine."""
    return json.dumps(
        {
            "suite": run.suite,
            "size": run.size,
            "rounds": run.rounds,
            "order_seed": run.seed,
            "machine": run.machine,
            "workloads": [_outcome_json(outcome) for outcome in run.outcomes],
        },
        indent=2,
    )


def _outcome_json(outcome: Outcome) -> dict[str, object]:
    workload = outcome.workload
    return {
        "name": workload.name,
        "title": workload.fill(workload.title, outcome.size),
        "baseline": workload.baseline,
        "sizes": asdict(workload.sizes[outcome.size]),
        "notes": {variant.name: workload.fill(variant.note, outcome.size) for variant in workload.variants},
        "metrics": [{**asdict(metric), "rows": [asdict(row) for row in rows(outcome, metric)]} for metric in workload.metrics],
        "targets": [asdict(verdict) for verdict in verdicts(outcome)],
        "samples": [asdict(sample) for sample in outcome.samples],
        "failures": [asdict(failure) for failure in outcome.failures],
        "missing": [asdict(missing) for missing in outcome.missing],
    }


def _sections(outcome: Outcome) -> list[_Section]:
    workload = outcome.workload
    sections = []
    for metric in workload.metrics:
        title = f"{workload.fill(workload.title, outcome.size)}{_which(outcome, metric, ', {}')} ({metric.better} is better)"
        columns = ["variant", metric.unit, "min – max"]
        if workload.baseline:
            columns.append(f"vs {workload.baseline}")
        if metric.ideal:
            columns.append(f"vs ideal {metric.ideal:g} {metric.unit}")
        cells = [_cells(row, bool(workload.baseline), bool(metric.ideal)) for row in rows(outcome, metric)]
        sections.append(_Section(title, columns, cells))
    return sections


def _cells(row: Row, has_baseline: bool, has_ideal: bool) -> list[str]:
    cells = [row.variant, _number(row.median), f"{_number(row.low)} – {_number(row.high)}"]
    if has_baseline:
        cells.append(_times(row.ratio))
    if has_ideal:
        cells.append(_times(row.of_ideal))
    return cells


def _which(outcome: Outcome, metric: Metric, text: str) -> str:
    """The metric's name in the text, where there are several to be told apart."""
    return text.format(metric.name) if len(outcome.workload.metrics) > 1 else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".removesuffix(".")


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{_number(ratio)}×"


def _target_text(outcome: Outcome, verdict: Verdict) -> str:
    target = verdict.target
    metric = next(metric for metric in outcome.workload.metrics if metric.name == target.metric)
    words = "at least" if metric.better == "higher" else "at most"
    unit = f"× {target.relative_to}" if target.relative_to else f" {metric.unit}"
    head = f"target: {target.variant}{_which(outcome, metric, ' ({})')} {words} {target.bound:,g}{unit}: "
    if verdict.reached is None:
        return head + "not judged: no measurement"
    if verdict.met is None:
        return head + "not judged: quick sizes"
    reached = _times(verdict.reached) if target.relative_to else f"{_number(verdict.reached)} {metric.unit}"
    return head + f"{reached}, {'met' if verdict.met else 'NOT MET'}"


def _absences(outcome: Outcome) -> Iterator[str]:
    for missing in outcome.missing:
        yield f"{missing.variant}: not installed: pip install {' '.join(missing.packages)}"
    for failure in outcome.failures:
        yield f"{failure.variant}: left out, it failed in round {failure.round + 1}: {failure.reason}"


def _notes(outcome: Outcome) -> Iterator[str]:
    for variant in outcome.workload.variants:
        if variant.note:
            yield f"{variant.name}: {outcome.workload.fill(variant.note, outcome.size)}"


def _tail(failure: Failure, lines: int = 40) -> str:
    written = failure.output.splitlines()
    left_out = [f"… {len(written) - lines} lines before …"] if len(written) > lines else []
    return "\n".join([f"{failure.variant} wrote:", *left_out, *written[-lines:]])


def _machine_lines(run: Run) -> list[str]:
    machine = run.machine
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else "unknown memory"
    load = ", ".join(f"{value:.2f}" for value in machine["load_average"] or ()) or "unknown"
    devices = dict.fromkeys(str(sample.details["device"]) for outcome in run.outcomes for sample in outcome.samples)
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return [
        f"{machine['cpu']}, {machine['usable_cores']} of {machine['cores']} cores, {memory}; {machine['platform']}",
        f"JAX device: {'; '.join(devices) or 'none'}",
        f"Python {machine['python']}, {versions}",
        f"penstock {machine['penstock']}, commit {machine['commit'] or 'unknown'}",
        f"{machine['date']}, load average at start {load}",
    ]


def _method(run: Run) -> str:
    rounds = "1 round" if run.rounds == 1 else f"{run.rounds} rounds"
    return (
        f"Medians of {rounds}; ratios are medians of the ratios within rounds. Each variant ran in a fresh process in "
        f"every round, in a shuffled order (seed {run.seed}), and was verified outside of the timed part."
    )


def _markdown_table(section: _Section) -> list[str]:
    rule = ["---", *["---:"] * (len(section.columns) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (section.columns, rule, *section.cells)]
