"""Findings of the doctor, and their report as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "absent", "warning", "wrong", "unknown"]
_MARKS: dict[Status, str] = {"ok": "ok", "absent": "–", "warning": "!", "wrong": "WRONG", "unknown": "?"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
      section: the heading that it stands under.
      name: of the thing.
      status: "ok"; "absent" for something optional that is not here; "warning" for what costs speed or was not tested; "wrong"
        for what gives wrong results or cannot work; "unknown" where it could not be found out.
      found: what is here.
      remedy: what to do; "" where there is nothing to do.
    """

    section: str
    name: str
    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """All findings. `print` shows them as a table."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; warnings, and things that are absent or unknown, are no wrong."""
        return all(finding.status != "wrong" for finding in self.findings)

    def __str__(self) -> str:
        widths = [max((len(text) for text in column), default=0) for column in zip(*map(_cells, self.findings), strict=True)]
        lines: list[str] = []
        section = ""
        for finding in self.findings:
            if finding.section != section:
                section = finding.section
                lines += ["", section] if lines else [section]
            mark, name = (text.ljust(width) for text, width in zip(_cells(finding), widths, strict=True))
            lines.append(f"  {mark}  {name}  {finding.found}")
            if finding.remedy:
                lines.append(f"  {' ' * widths[0]}  {' ' * widths[1]}  → {finding.remedy}")
        return "\n".join([*lines, "", self.summary])

    __repr__ = __str__

    @property
    def summary(self) -> str:
        """One line: how much is wrong, and how much is worth a look."""
        counts = {
            status: sum(finding.status == status for finding in self.findings) for status in ("wrong", "warning", "unknown")
        }
        said = [
            f"{count} {'is' if count == 1 else 'are'} {word}"
            for count, word in (
                (counts["wrong"], "wrong"),
                (counts["warning"], "worth a look (!)"),
                (counts["unknown"], "unknown (?)"),
            )
            if count
        ]
        return f"{len(self.findings)} things looked at: {', '.join(said) or 'all is well'}"

    def to_json(self) -> str:
        """All findings as JSON."""
        return json.dumps({"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}, indent=1)


def _cells(finding: Finding) -> tuple[str, str]:
    return _MARKS[finding.status], finding.name
