"""Read a page as a reader, a screen reader and a drawing program see it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from typing import Any

from tests.html_page import SVG

METRIC = {"name": "speed", "unit": "m/s", "better": "higher", "ideal": None, "rows": []}
EVIL = "<script>alert(1)</script>\"'&"


def svgs_of(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def positions(svg: ElementTree.Element) -> Iterator[tuple[float, float]]:
    """Where all marks are, and where all texts begin or end."""
    for element in svg.iter():
        kind, at = element.tag.removeprefix(f"{{{SVG}}}"), element.attrib
        if kind == "line":
            yield float(at["x1"]), float(at["y1"])
            yield float(at["x2"]), float(at["y2"])
        elif kind == "circle":
            x, y, radius = float(at["cx"]), float(at["cy"]), float(at["r"])
            yield from [(x - radius, y - radius), (x + radius, y + radius)]
        elif kind == "text":
            yield float(at["x"]), float(at["y"])
        elif kind == "path":
            for pair in re.split("[MLZ]", at["d"]):
                if pair:
                    x, y = map(float, pair.split())
                    yield x, y


def assert_inside(svg: ElementTree.Element) -> None:
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    for x, y in positions(svg):
        assert 0 <= x <= width, svg.attrib["aria-label"]
        assert 0 <= y <= height


def first_of(run: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """The run with its first workload alone, changed."""
    return {**run, "workloads": [{**run["workloads"][0], **changed}]}
