"""Reduce reports of `penstock bench` to what `bench/results` keeps: medians, ratios with their intervals, and the environment.

python bench/scripts/condense.py --command "penstock bench feed" feed.json > bench/results/feed.json
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]
_ROW, _SCORE = ("variant", "runs", "median", "low", "high"), ("seconds", "memory", "bytes_on_wire")
_RATIO = ("variant", "metric", "baseline", "control", "pairs", "ratio", "low", "high", "p_corrected", "detectable", "verdict")


def main() -> None:
    """Read the reports, and print them as one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", nargs="+", type=Path, help="a file that `penstock bench --json` wrote")
    parser.add_argument("--command", required=True, help="the command that made the reports")
    arguments = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in arguments.report]
    text = json.dumps({"reports": condense(reports, arguments.command)}, indent=1, ensure_ascii=False)
    # A string in JSON has no raw line break, so only the layout of lists and of objects of lists changes.
    print(re.sub(r"\{(?:[^][{}]|\[[^][{}]*\])*\}|\[[^][{}]*\]", lambda found: re.sub(r"\n\s*", " ", found[0]), text))


def condense(reports: Sequence[Report], command: str) -> list[dict[str, Any]]:
    """Return the reports without samples, with six significant digits. The last report that has a score counts."""
    latest = {name: index for index, report in enumerate(reports) for name, _ in _scores(report)}
    return [
        {
            "command": command,
            **{"date": report["machine"]["date"], "commit": report["machine"]["commit"], "partial": report["partial"]},
            **{"machine": report["machine_lines"], "verdict": report["verdict"]["sentences"]},
            "workloads": [_workload(workload) for workload in report["workloads"] if not workload["scored"]],
            "scores": {name: score for name, score in _scores(report) if latest[name] == index},
        }
        for index, report in enumerate(reports)
    ]


def _workload(workload: Report) -> dict[str, Any]:
    """Return the medians and ranges of each metric, the ratios with their intervals, and the targets."""
    return {name: workload[name] for name in ("name", "title", "notes")} | {
        "metrics": {f"{each['name']}, {each['unit']}": _table(each["rows"], _ROW) for each in workload["metrics"]},
        "ratios": _table(workload["comparisons"], _RATIO),
        "targets": [target["text"] for target in workload["targets"]],
    }


def _table(rows: Sequence[Report], columns: Sequence[str]) -> list[Any]:
    return [columns, *([_rounded(row[name]) for name in columns] for row in rows)]


def _scores(report: Report) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each score by compiler and variant. A layout has [seconds, bytes of memory, bytes sent]."""
    for sample in (each for workload in report["workloads"] if workload["scored"] for each in workload["samples"]):
        details, values = sample["details"], {name: _rounded(value) for name, value in sample["values"].items()}
        compiler = f"{details['task']['compiler']['name']}: " if "task" in details else ""
        if "plan" in details:
            values |= {"mesh": details["plan"]["mesh"], "best by hand": sample["remarks"]["columns"].get("best by hand")}
            layouts = [{"name": "plan", **details["plan"]}, *details["baselines"]]
            figures = {each["name"]: each["score"] and [_rounded(each["score"][name]) for name in _SCORE] for each in layouts}
            values["plan"] = figures.pop("plan")
            yield f"{compiler}{details['task']['model']} {details['task']['mesh']}, by hand", figures
        yield compiler + sample["variant"], values


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
