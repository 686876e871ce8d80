"""The report of `penstock doctor`: findings, written as text or as JSON."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "absent", "warning", "wrong", "unknown"]
_MARKS: dict[Status, str] = {"ok": "ok", "absent": "–", "warning": "!", "wrong": "WRONG", "unknown": "?"}


@dataclass(frozen=True)
class Finding:
    """One examined property of the environment.

    Attributes:
      section: the heading in the report.
      name: name of the property.
      status: "ok"; "absent" for something optional that is not installed; "warning" if it costs speed or was not tested; "wrong"
        if it gives wrong results or cannot work; "unknown" if it could not be examined.
      found: the value found.
      remedy: the advice; "" if there is nothing to do.
    """

    section: str
    name: str
    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """All findings. Print it to see them as a table.

    Attributes:
      findings: the findings, in the order of the report.
    """

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Return whether nothing is wrong. Findings that are warnings, absent or unknown are allowed."""
        return all(finding.status != "wrong" for finding in self.findings)

    def __str__(self) -> str:
        marks = max((len(_MARKS[finding.status]) for finding in self.findings), default=0)
        names = max((len(finding.name) for finding in self.findings), default=0)
        lines: list[str] = []
        for section, findings in itertools.groupby(self.findings, lambda finding: finding.section):
            lines += ["", section] if lines else [section]
            for finding in findings:
                lines.append(f"  {_MARKS[finding.status]:{marks}}  {finding.name:{names}}  {finding.found}")
                if finding.remedy:
                    lines.append(f"  {'':{marks}}  {'':{names}}  → {finding.remedy}")
        return "\n".join([*lines, "", self.summary])

    __repr__ = __str__

    @property
    def summary(self) -> str:
        """Return one line with the numbers of findings that are wrong, worth a look, or unknown."""
        counts = Counter(finding.status for finding in self.findings)
        words: dict[Status, str] = {"wrong": "wrong", "warning": "worth a look (!)", "unknown": "unknown (?)"}
        number = {status: f"{count} {'is' if count == 1 else 'are'}" for status, count in counts.items()}
        parts = [f"{number[status]} {word}" for status, word in words.items() if status in number]
        return f"{len(self.findings)} things looked at: {', '.join(parts) or 'all is well'}"

    def to_json(self) -> str:
        """Return all findings as JSON."""
        return json.dumps({"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}, indent=1)
