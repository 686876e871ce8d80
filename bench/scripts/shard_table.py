"""Print the tables of plans in bench/results, from one or more reports of `penstock bench shard`.

    penstock bench shard --topology cpu --topology v5e:2x4 --json zoo.json
    python bench/scripts/shard_table.py zoo.json

A row is a step on a mesh, and a column is a compiler and a limit of memory, or the largest proved gap of a compiler's plans. In
brackets is the time if each collective has a latency. The suite of Keras Hub has three more tables: medians by limit, memory and
sent bytes beside layouts by hand, and the fitted models. Below are the errors of predicted peak memory, by suite and compiler. If
several reports have a cell, the last one counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from penstock._bytes import format_bytes
from penstock.shard.wording import format_seconds
from penstock_bench.suites.shard.task import LIMITS

Sample = Mapping[str, Any]


def main() -> None:
    """Read the reports, and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", nargs="+", type=Path, help="a file that `penstock bench shard --json` wrote")
    reports = [json.loads(path.read_text()) for path in parser.parse_args().report]
    print("\n".join(tables(reports)))


def tables(reports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of all tables, as Markdown."""
    samples = {(_place(sample), sample["variant"]): sample for sample in _samples(reports)}
    suites = dict.fromkeys(suite for (suite, _), _ in samples)
    for suite in suites:
        mine = [sample for ((of, _), _), sample in samples.items() if of == suite]
        yield from [f"### {suite}", ""]
        if suite == "keras":
            mine = sorted(mine, key=_alphabetical)
            yield from [*_medians(mine), "", *_beside(mine), "", *_fitted(reports), ""]
        yield from [*(_real if suite == "real" else _limits)(mine), ""]
    yield from _memory(samples.values())


def _samples(reports: Sequence[Mapping[str, Any]]) -> Iterator[Sample]:
    """Yield the samples that score plans, or the planner's own baselines."""
    for report in reports:
        for workload in report["workloads"]:
            yield from (each for each in workload["samples"] if {"plan", "own"} & set(each["details"]))


def _place(sample: Sample) -> tuple[str, str]:
    """Return the suite and the compiler of a sample."""
    task = sample["details"]["task"]
    return task["suite"], task["compiler"]["name"]


def _limits(samples: Sequence[Sample]) -> Iterator[str]:
    """Yield a table of the times of plans over the times of the best layouts by hand, and of the proved gaps of plans."""
    plans = [sample for sample in samples if "plan" in sample["details"]]
    cells = {(_row(sample), _column(sample)): _cell(sample) for sample in plans}
    gaps: dict[tuple[str, str], list[float]] = {}
    for sample in plans:
        if "proved gap" in sample["values"]:  # else no plan fits by the estimate
            gaps.setdefault((_row(sample), f"{_place(sample)[1]}, proved gap"), []).append(sample["values"]["proved gap"])
    yield from _table("step, mesh", cells | {key: f"{max(found):.2f} %" for key, found in gaps.items()}, "---:")


def _table(head: str, cells: Mapping[tuple[str, str], str], alignment: str) -> Iterator[str]:
    """Yield a table of cells by row and column, with the columns and rows in the order in which they come."""
    columns = list(dict.fromkeys(column for _, column in cells))
    yield f"| {head} | {' | '.join(columns)} |"
    yield f"| --- |{f' {alignment} |' * len(columns)}"
    for row in dict.fromkeys(row for row, _ in cells):
        yield f"| {row} | {' | '.join(cells.get((row, column), '') for column in columns)} |"


def _row(sample: Sample) -> str:
    task = sample["details"]["task"]
    return f"{task['model']}, {task['mesh']}"


def _column(sample: Sample) -> str:
    return f"{_place(sample)[1]}, {sample['details']['plan']['limit']}"


def _cell(sample: Sample) -> str:
    """Return the times of a plan over the times of the best layout by hand that fits, without and with latency, or why not."""
    remarks = sample.get("remarks", {})
    if "time" in remarks.get("missed", {}):
        return f"**{'refused' if sample['details']['plan']['refused'] else 'lost'}**"
    exempt = remarks.get("exempt", {}).get("time")
    if exempt is not None:
        return "alone" if exempt == "only the plan fits" else "–"
    times = (f"{sample['values'][time]:.2f}" for time in ("time", "time with latency"))
    return "{} ({})".format(*times)


_BY_HAND = ("data parallel", "FSDP", "Keras Hub's map")


def _alphabetical(sample: Sample) -> tuple[str, int, int]:
    """Return what orders rows by model, then by the axes of the mesh, and columns by the limit."""
    task, plan = sample["details"]["task"], sample["details"].get("plan")
    return task["model"], task["mesh"].count("x"), LIMITS.index(plan["limit"]) if plan else len(LIMITS)


def _medians(samples: Sequence[Sample]) -> Iterator[str]:
    """Yield a table of the medians over all models, by the limit."""
    yield "| limit | plans | refused | no slower | time | memory ÷ " + ", ".join(_BY_HAND) + " | sent ÷ the same |"
    yield "| --- | ---: | ---: | ---: | ---: | --- | --- |"
    plans = [sample for sample in samples if "plan" in sample["details"]]
    for limit in LIMITS:
        mine = [sample for sample in plans if sample["details"]["plan"]["limit"] == limit]
        times = [sample["values"]["time"] for sample in mine if "time" in sample["values"]]
        if not times:
            continue
        refused = sum(sample["details"]["plan"]["refused"] for sample in mine)
        fast = f"{sum(round(time, 2) <= 1 for time in times)} of {len(times)}"
        ratios = (", ".join(_median(_by_hand(sample, figure) for sample in mine)) for figure in ("memory", "bytes_on_wire"))
        yield f"| {limit} | {len(mine)} | {refused} | {fast} | {median(times):.2f} | {' | '.join(ratios)} |"


def _median(rows: Iterable[Sequence[float | None]]) -> Iterator[str]:
    """Yield the median of each column; "–" where there is none."""
    for column in zip(*rows, strict=True):
        found = [ratio for ratio in column if ratio is not None]
        yield f"{median(found):.2f}" if found else "–"


def _by_hand(sample: Sample, figure: str) -> list[float | None]:
    """Return a figure of a plan over the same figure of each layout by hand; None where there is no such layout, or no plan.

    Args:
      sample: the plan and the layouts.
      figure: a figure of their scores, in bytes.
    """
    plan = sample["details"]["plan"]["score"]
    by_hand = {each["name"]: each["score"] for each in sample["details"]["baselines"]}
    scores = [by_hand.get(name) for name in _BY_HAND]
    return [plan[figure] / each[figure] if plan and each and each[figure] else None for each in scores]


def _beside(samples: Sequence[Sample]) -> Iterator[str]:
    """Yield a table of the memory of plans and the bytes that they send, beside layouts by hand.

    These need not keep the limit.
    """
    cells = {}
    for sample in (each for each in samples if "plan" in each["details"]):
        row, limit = _row(sample), sample["details"]["plan"]["limit"]
        cells[row, f"{limit}: memory"] = _ratios(sample, "memory", amount=True)
        cells[row, f"{limit}: sent"] = _ratios(sample, "bytes_on_wire", amount=False)
    yield from _table(f"model, mesh (÷ {', '.join(_BY_HAND)})", cells, "---")


def _ratios(sample: Sample, figure: str, amount: bool) -> str:
    """Return a figure of a plan over each layout by hand, after the bytes of the plan if `amount` is set."""
    plan = sample["details"]["plan"]["score"]
    if not plan:
        return "refused" if sample["details"]["plan"]["refused"] else "failed"
    ratios = ", ".join("–" if ratio is None else f"{ratio:.2f}" for ratio in _by_hand(sample, figure))
    return f"{format_bytes(plan[figure])}: {ratios}" if amount else ratios


def _fitted(reports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table of the models of Keras that were fitted under `AutoShardDistribution`."""
    yield "| fitted, mesh | difference of a loss | parameters on a device ÷ an eighth | planning | of a second fit |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    samples = (each for report in reports for workload in report["workloads"] for each in workload["samples"])
    fits = {each["variant"]: each["values"] for each in samples if "second fit" in each["values"]}
    for name, values in sorted(fits.items(), key=lambda fit: (fit[0].split()[0], fit[0].count("x"))):
        times = [format_seconds(values[metric]) for metric in ("planning", "second fit")]
        yield f"| {name} | {values['difference']:.1e} | {values['parameters']:.2f} | {' | '.join(times)} |"


def _real(samples: Sequence[Sample]) -> Iterator[str]:
    """Yield a table of plans for real sizes beside the best layouts by hand."""
    yield "| case | plan: mesh | time | memory | best by hand | time | memory | ratio |"
    yield "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: |"
    for sample in samples:
        details = sample["details"]
        if "plan" not in details:
            continue
        plan, name = details["plan"], sample["remarks"]["columns"]["best by hand"]
        best = next((each["score"] for each in details["baselines"] if each["name"] == name), None)
        cells = [details["task"]["model"], plan["mesh"] or "–", *_score(plan["score"]), name, *_score(best), _cell(sample)]
        yield f"| {' | '.join(cells)} |"


def _score(score: Mapping[str, Any] | None) -> tuple[str, str]:
    return (format_seconds(score["seconds"]), format_bytes(score["memory"])) if score else ("–", "–")


def _memory(samples: Iterable[Sample]) -> Iterator[str]:
    """Yield a table of the errors of predicted peak memory."""
    errors: dict[tuple[str, str], list[float]] = {}
    for sample in samples:
        if "peak memory" in sample["values"]:
            errors.setdefault(_place(sample), []).append(abs(sample["values"]["peak memory"]))
    yield "| predicted peak memory | compiler | programs | median error | worst |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for (suite, compiler), found in errors.items():
        calibrated = f"{suite}{', calibrated on it' if suite == 'zoo' else ''}"
        yield f"| {calibrated} | {compiler} | {len(found)} | {median(found):.1f} % | {max(found):.1f} % |"


if __name__ == "__main__":
    main()
