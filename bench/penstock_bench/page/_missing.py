"""Show a workload's missing and failed variants and its sizes on the page, from its JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.page import Content, Markup, tag

_Json = Mapping[str, Any]


def absences(workload: _Json) -> Content:
    """Return the variants that were not measured, with the command that installs one, and those that failed."""
    missing = [
        tag(
            "li",
            tag("strong", one["variant"]),
            f": {one['reason']}",
            [". To have it: ", tag("code", one["command"])] if one["command"] else None,
        )
        for one in workload["missing"]
    ]
    failed = [
        tag(
            "li",
            tag("strong", one["variant"]),
            " was left out, it failed ",
            "before the first round: " if one["round"] is None else f"in round {one['round'] + 1}: ",
            one["reason"],
            tag("details", tag("summary", "What it wrote"), tag("pre", one["output"])) if one["output"] else None,
        )
        for one in workload["failures"]
    ]
    return [
        [tag("h3", "Not measured"), tag("ul", missing)] if missing else None,
        [tag("h3", "Failed"), tag("ul", failed)] if failed else None,
    ]


def sizes(sizes: _Json) -> Content:
    """Return the sizes of a workload in a collapsed section."""
    if not sizes:
        return None
    written = [(key, f"{value:,}" if type(value) is int else str(value)) for key, value in sizes.items()]
    return tag("details", tag("summary", "Sizes of the workload"), definitions(written))


def definitions(pairs: Iterable[tuple[str, str]]) -> Markup:
    """Return a list of terms with their definitions."""
    return tag("dl", [tag("div", tag("dt", term), tag("dd", words)) for term, words in pairs])
