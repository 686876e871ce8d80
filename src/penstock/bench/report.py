"""A run as tables on the terminal and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.bench import sentences
from penstock.bench.machine import known_faults
from penstock.bench.model import Failure, Metric, Outcome, Run
from penstock.bench.summary import Claim, Judgement, Row, judge, rows
from penstock.bench.text import number, times


@dataclass(frozen=True)
class _Section:
    """The table of one metric, as text; the first column names the variants."""

    title: str
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]


def print_report(console: Console, run: Run) -> None:
    """Print what the controls say, the tables of each workload and what they mean, and how all was measured."""
    judgement = judge(run)
    for line in opening(run, judgement):
        console.print(line, style="bold" if judgement.trusted else "bold red", markup=False, highlight=False)
    console.print()
    for place, outcome in enumerate(run.outcomes):
        _print_outcome(console, outcome, judgement, place)
    for line in (*machine_lines(run), method(run)):
        console.print(line, style="dim", markup=False, highlight=False)


def as_markdown(run: Run) -> str:
    """The same as Markdown, for a pull request."""
    judgement = judge(run)
    lines = [f"# penstock bench {run.suite}", ""]
    for line in opening(run, judgement):
        lines += [f"**{line}**", ""]
    lines += [*[f"- {line}" for line in machine_lines(run)], "", method(run), ""]
    for place, outcome in enumerate(run.outcomes):
        lines += [f"## {outcome.workload.name}", ""]
        for section in _sections(outcome, judgement.claims[place]):
            lines += [section.title, "", *_markdown_table(section), ""]
        if outcome.parity:
            parity = _parity_section(outcome)
            lines += [parity.title, "", *_markdown_table(parity), ""]
        lines += [f"- {sentences.claim_text(outcome, claim)}" for claim in judgement.claims[place]]
        lines += [f"- {sentences.verdict_text(outcome, verdict)}" for verdict in judgement.verdicts[place]]
        lines += [f"- {line}" for line in (*absences(outcome), *_notes(outcome))]
        for failure in outcome.failures:
            lines += ["", *_fenced(_tail(failure))]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def opening(run: Run, judgement: Judgement) -> list[str]:
    """What a reader must know before any number."""
    partial = [f"PARTIAL: {run.partial}."] if run.partial else []
    return [*partial, sentences.trust(run, judgement)]


def absences(outcome: Outcome) -> Iterator[str]:
    """What is not in the tables, and why."""
    ran, baseline = {sample.variant for sample in outcome.samples}, outcome.workload.baseline
    if ran and baseline and baseline not in ran:
        yield f"nothing is compared: {baseline}, the baseline, did not run"
    for missing in outcome.missing:
        yield f"{missing.variant}: {missing.reason}{missing.command and ': '}{missing.command}"
    for failure in outcome.failures:
        when = "before the first round" if failure.round is None else f"in round {failure.round + 1}"
        yield f"{failure.variant}: left out, it failed {when}: {failure.reason}"


def machine_lines(run: Run) -> list[str]:
    """What the numbers were measured on."""
    machine = run.machine
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else "unknown memory"
    samples = [sample for outcome in run.outcomes for sample in outcome.samples]
    devices = dict.fromkeys(str(sample.details["device"]) for sample in samples if "device" in sample.details)
    loads = [sample.load for sample in samples if sample.load is not None]
    load = f"{min(loads):.2f} to {max(loads):.2f}" if loads else "unknown"
    return [
        f"{machine['cpu']}, {machine['usable_cores']} of {machine['cores']} cores, {memory}; {machine['platform']}",
        f"clocks: {machine['clocks'] or 'unknown'}; transparent huge pages: {machine['huge_pages'] or 'unknown'}",
        f"load average before the runs {load} (their own included)",
        *[f"GPU: {gpu}" for gpu in machine["gpus"]],
        f"devices: {'; '.join(devices) or 'none'}",
        f"Python {machine['python']}, {_versions(machine['versions'])}",
        *_versions_elsewhere(run),
        known_faults(machine),
        f"flags: {', '.join(f'{name}={value}' for name, value in machine['flags'].items()) or 'none'}",
        f"penstock {machine['penstock']}, commit {machine['commit'] or 'unknown'}",
        f"{machine['date']}, {run.seconds / 60:.1f} minutes",
    ]


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _versions_elsewhere(run: Run) -> list[str]:
    """Of the variants that have an interpreter of their own."""
    found: dict[str, None] = {}
    for outcome in run.outcomes:
        elsewhere = {variant.name for variant in outcome.workload.variants if variant.environment}
        for sample in outcome.samples:
            if sample.variant in elsewhere and "versions" in sample.details:
                found[f"{sample.variant}, in an interpreter of its own: {_versions(sample.details['versions'])}"] = None
    return list(found)


def method(run: Run) -> str:
    """How the numbers were made."""
    counts = sorted({outcome.rounds for outcome in run.outcomes})
    rounds = (
        "1 round"
        if counts == [1]
        else f"{' to '.join(dict.fromkeys(map(str, (counts[0], counts[-1]))))} rounds"
        if counts
        else "no round"
    )
    return (
        f"Each variant ran in a fresh process in each of {rounds}, in a shuffled order (seed {run.seed}, every second round "
        "backwards), and was verified outside of the timed part. Where steps are timed, a run's number is the median of "
        "them without warm-up and, of ten or more, without their first and last tenth; where stalls count, as with a loader, it "
        "is their mean. Ratios are 20 % trimmed means over rounds, with "
        "bootstrap intervals over rounds; p-values are Yuen's, corrected by Holm over the report. docs/measuring.md says why."
    )


def _print_outcome(console: Console, outcome: Outcome, judgement: Judgement, place: int) -> None:
    sections = _sections(outcome, judgement.claims[place])
    if outcome.parity:
        sections.append(_parity_section(outcome))
    for section in sections:
        table = Table(title=escape(section.title), title_justify="left", title_style="bold", min_width=60)
        for place_in_row, column in enumerate(section.columns):
            table.add_column(escape(column), justify="right" if place_in_row else "left")
        for cells in section.cells:
            table.add_row(*map(escape, cells))
        console.print(table)
    for claim in judgement.claims[place]:
        console.print(sentences.claim_text(outcome, claim), markup=False, highlight=False)
    for verdict in judgement.verdicts[place]:
        style = {True: "green", False: "red", None: "yellow"}[verdict.met]
        console.print(sentences.verdict_text(outcome, verdict), style=style, markup=False, highlight=False)
    for line in absences(outcome):
        console.print(line, style="yellow", markup=False, highlight=False)
    for line in [*_notes(outcome), *map(_tail, outcome.failures)]:
        console.print(line, style="dim", markup=False, highlight=False)
    console.print()


def _sections(outcome: Outcome, claims: Sequence[Claim]) -> list[_Section]:
    workload = outcome.workload
    sections = []
    for metric in workload.metrics:
        columns = ["variant", metric.unit, "min – max"]
        if workload.baseline:
            columns += [f"vs {workload.baseline}", "95 % interval", "verdict"]
        if metric.ideal:
            columns.append(f"vs ideal {metric.ideal:g} {metric.unit}")
        cells = [_cells(outcome, metric, row, claims) for row in rows(outcome, metric)]
        sections.append(_Section(sentences.table_title(outcome, metric), columns, cells))
    return sections


def _cells(outcome: Outcome, metric: Metric, row: Row, claims: Sequence[Claim]) -> list[str]:
    baseline = outcome.workload.baseline
    cells = [row.variant, number(row.median), f"{number(row.low)} – {number(row.high)}"]
    if baseline:
        found = [c for c in claims if (c.metric, c.variant, c.baseline) == (metric, row.variant, baseline) and not c.control]
        cells += _compared(found[0]) if found else ["1" if row.variant == baseline else "–", "", ""]
    if metric.ideal:
        cells.append(times(row.of_ideal))
    return cells


def _compared(claim: Claim) -> list[str]:
    low, high = claim.comparison.low, claim.comparison.high
    return [times(claim.comparison.ratio), "–" if low is None else f"{times(low)} – {times(high)}", claim.call]


def _parity_section(outcome: Outcome) -> _Section:
    agreement = outcome.workload.agreement
    title = f"parity, before anything was timed: relative difference from {agreement.reference.name if agreement else '–'}"
    cells = [
        [p.variant, p.quantity, f"{p.difference:.2g}", f"{p.tolerance:g}", "yes" if p.agreed else "NO"] for p in outcome.parity
    ]
    return _Section(title, ["variant", "quantity", "difference", "tolerance", "agrees"], cells)


def _notes(outcome: Outcome) -> Iterator[str]:
    for variant in outcome.workload.variants:
        if variant.note:
            yield f"{variant.name}: {outcome.workload.fill(variant.note, outcome.size)}"


def _tail(failure: Failure, lines: int = 40) -> str:
    written = failure.output.splitlines()
    left_out = [f"… {len(written) - lines} lines before …"] if len(written) > lines else []
    return "\n".join([f"{failure.variant} wrote:", *left_out, *written[-lines:]])


def _markdown_table(section: _Section) -> list[str]:
    rule = ["---", *["---:"] * (len(section.columns) - 1)]
    escaped = [[cell.replace("|", "\\|") for cell in cells] for cells in (section.columns, rule, *section.cells)]
    return [f"| {' | '.join(cells)} |" for cells in escaped]


def _fenced(text: str) -> list[str]:
    """A block that nothing inside of it ends."""
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", text, fence]
