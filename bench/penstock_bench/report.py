"""Write the report of a run as tables and sentences, on the terminal and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from penstock_bench import wording
from penstock_bench.machine import known_faults
from penstock_bench.method import method
from penstock_bench.outcome import Failure, Outcome, Run
from penstock_bench.tables import Table, parity_table, score_tables, timed_tables
from penstock_bench.verdict import Judgement, Verdict, judge

_MOST_MISSES = 8  # of a target, on the terminal


def print_report(console: Console, run: Run) -> None:
    """Print the result of the controls, each workload's tables and verdicts, and how the numbers were measured."""
    judgement = judge(run)
    timed = any(not outcome.workload.scored for outcome in run.outcomes)
    alarming = bool(run.partial) or (timed and not judgement.trusted)
    for line in opening(run, judgement):
        console.print(line, style="bold red" if alarming else "bold", markup=False, highlight=False)
    console.print()
    for index, outcome in enumerate(run.outcomes):
        _print_outcome(console, outcome, judgement, index)
    for line in (*machine_lines(run), *method(run)):
        console.print(line, style="dim", markup=False, highlight=False)


def as_markdown(run: Run) -> str:
    """Return the report as Markdown, for a pull request, with all columns and tables."""
    judgement = judge(run)
    lines = [f"# penstock {wording.of_command(run.suite)}", ""]
    for line in opening(run, judgement):
        lines += [f"**{line}**", ""]
    lines += [*[f"- {line}" for line in machine_lines(run)], ""]
    for paragraph in method(run):
        lines += [paragraph, ""]
    for index, outcome in enumerate(run.outcomes):
        lines += [f"## {outcome.workload.name}", ""]
        for table in _tables(outcome, judgement, index):
            lines += [table.title, "", *_markdown_table(table), ""]
        lines += [f"- {wording.claim_text(outcome, claim)}" for claim in judgement.claims[index]]
        for verdict in judgement.verdicts[index]:
            lines += [f"- {wording.verdict_text(outcome, verdict)}", *(f"  - {miss}" for miss in verdict.misses)]
        lines += [f"- {line}" for line in (*absences(outcome), *notes(outcome))]
        for failure in outcome.failures:
            lines += ["", *_fenced(_tail(failure))] if failure.output else []
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def opening(run: Run, judgement: Judgement) -> list[str]:
    """Return the first lines of the report: they say whether its numbers can be trusted."""
    partial = [f"PARTIAL: {run.partial}."] if run.partial else []
    return [*partial, *wording.trust(run, judgement)]


def absences(outcome: Outcome) -> Iterator[str]:
    """Yield a line for each variant that is missing or failed, with the reason."""
    if outcome.alone:
        yield f"the variants ran one after the other: {outcome.alone}"
    ran, baseline = {sample.variant for sample in outcome.samples}, outcome.workload.baseline
    if ran and baseline and baseline not in ran:
        yield f"nothing is compared: {baseline}, the baseline, did not run"
    for missing in outcome.missing:
        yield f"{missing.variant}: {missing.reason}{missing.command and ': '}{missing.command}"
    for failure in outcome.failures:
        when = "before the first round" if failure.round is None else f"in round {failure.round + 1}"
        yield f"{failure.variant}: left out, it failed {when}: {failure.reason}"


def notes(outcome: Outcome) -> Iterator[str]:
    """Yield the notes of the variants and of their scores, each different text once."""
    for variant in outcome.workload.variants:
        if variant.note:
            yield f"{variant.name}: {outcome.workload.fill(variant.note, outcome.size)}"
    variants: dict[str, dict[str, None]] = {}
    for sample in outcome.samples:
        for text in sample.remarks.notes:
            variants.setdefault(text, {})[sample.variant] = None
    ran = {sample.variant for sample in outcome.samples}
    for text, names in variants.items():
        yield f"{'all variants' if 1 < len(names) == len(ran) else ', '.join(names)}: {text}"


def machine_lines(run: Run) -> list[str]:
    """Return lines about the machine that the numbers were measured on."""
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
    """Return a line with the package versions of each variant that runs in another interpreter."""
    found: dict[str, None] = {}
    for outcome in run.outcomes:
        elsewhere = {variant.name for variant in outcome.workload.variants if variant.environment}
        for sample in outcome.samples:
            if sample.variant in elsewhere and "versions" in sample.details:
                found[f"{sample.variant}, in an interpreter of its own: {_versions(sample.details['versions'])}"] = None
    return list(found)


def _tables(outcome: Outcome, judgement: Judgement, index: int) -> list[Table]:
    """Return the tables of a workload."""
    tables = score_tables(outcome) if outcome.workload.scored else timed_tables(outcome, judgement.claims[index])
    return [*tables, parity_table(outcome)] if outcome.parity else tables


def _print_outcome(console: Console, outcome: Outcome, judgement: Judgement, index: int) -> None:
    tables = _tables(outcome, judgement, index)
    if outcome.workload.scored:
        _print_table(console, tables[0], [_style(outcome, row[0]) for row in tables[0].cells])
    else:
        for table in tables:
            _print_table(console, table)
    for claim in judgement.claims[index]:
        console.print(wording.claim_text(outcome, claim), markup=False, highlight=False)
    for verdict in judgement.verdicts[index]:
        _print_verdict(console, outcome, verdict)
    for line in absences(outcome):
        console.print(line, style="yellow", markup=False, highlight=False)
    for line in [*notes(outcome), *(_tail(failure) for failure in outcome.failures if failure.output)]:
        console.print(line, style="dim", markup=False, highlight=False)
    console.print()


def _print_table(console: Console, table: Table, styles: list[str | None] | None = None) -> None:
    """Print the first columns of a table, as many as fit on a terminal (`Table.narrow`)."""
    narrow = table.narrow < len(table.columns)
    printed = RichTable(title=escape(table.title), title_justify="left", title_style="bold", min_width=60)
    if narrow:
        printed.box = SIMPLE_HEAD
    for index, column in enumerate(table.columns[: table.narrow]):
        number = table.numeric[index]
        printed.add_column(escape(column), justify="right" if number else "left", no_wrap=narrow and index == 0)
    for cells, style in zip_longest(table.cells, styles or ()):
        printed.add_row(*map(escape, cells[: table.narrow]), style=style)
    console.print(printed)


def _print_verdict(console: Console, outcome: Outcome, verdict: Verdict) -> None:
    style = {True: "green", False: "red", None: "yellow"}[verdict.met]
    console.print(wording.verdict_text(outcome, verdict), style=style, markup=False, highlight=False)
    if verdict.met is not False:
        return
    for miss in verdict.misses[:_MOST_MISSES]:
        console.print(f"    {miss}", style="dim", markup=False, highlight=False)
    if len(verdict.misses) > _MOST_MISSES:
        console.print(f"    and {len(verdict.misses) - _MOST_MISSES} more", style="dim")


def _style(outcome: Outcome, variant: str) -> str | None:
    """Return the colour of a scored variant's row: red if it missed a target, yellow if it is exempt from one."""
    remarks = next(sample.remarks for sample in outcome.samples if sample.variant == variant)
    return "red" if remarks.missed or remarks.failure else "yellow" if remarks.exempt else None


def _tail(failure: Failure, lines: int = 40) -> str:
    """Return the last lines that a variant wrote before it failed."""
    written = failure.output.splitlines()
    left_out = [f"… {len(written) - lines} lines before …"] if len(written) > lines else []
    return "\n".join([f"{failure.variant} wrote:", *left_out, *written[-lines:]])


def _markdown_table(table: Table) -> list[str]:
    rule = ["---:" if numeric else "---" for numeric in table.numeric]
    escaped = [[cell.replace("|", "\\|") for cell in cells] for cells in (table.columns, rule, *table.cells)]
    return [f"| {' | '.join(cells)} |" for cells in escaped]


def _fenced(text: str) -> list[str]:
    """Return a fenced Markdown block whose fence is longer than any inside of the text."""
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", text, fence]
