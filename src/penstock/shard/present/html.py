"""Write a plan as one HTML page that needs no network.

In: a `PlanRecord`. Out: HTML with the same content as `text.py`, with bars for time and memory, and drawings of the layouts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from penstock._bytes import format_bytes
from penstock.page import Cell, Column, Content, Markup, asset, html_page, of_text, table, tag
from penstock.shard.apply.sharding_constraints import Spec
from penstock.shard.mesh.shapes import describe_mesh
from penstock.shard.present.drawing import layout_drawing
from penstock.shard.present.leaf_table import LeafGroup, group_layers
from penstock.shard.present.parallelism import describe_axis
from penstock.shard.present.text import about_check, is_over, memory_parts
from penstock.shard.record import PlanRecord
from penstock.shard.search.cost import Cost
from penstock.shard.units import format_seconds, format_share, format_spec

_BAR = 1000.0  # width of a bar in its own units
_Part = tuple[str, float, str]  # name, size, and the size in words


def plan_page(plan: PlanRecord) -> str:
    """Return the page of a plan as HTML. Paths of leaves and names of axes may contain any characters, and are escaped.

    Args:
      plan: the plan.
    """
    title = f"{math.prod(plan.mesh_shape.values())} × {plan.hardware}"
    return html_page(
        f"penstock plan, {title}",
        tag("header", tag("h1", tag("span", "penstock plan ", class_="quiet"), title), _axes(plan)),
        tag("main", _time(plan), _memory(plan), _collectives(plan.cost), _leaves(plan)),
        tag("footer", tag("p", f"All numbers are predictions for one device and one step. Plan {plan.fingerprint}.")),
        style=asset("penstock.shard.present", "page.css"),
    )


def _axes(plan: PlanRecord) -> Content:
    """Return the section with the mesh, and the use of each of its axes."""
    items = [
        tag(
            "li",
            _chip(),
            tag("span", tag("strong", f"{name} ({size})"), f": {', '.join(describe_axis(plan, name))}"),
            class_=f"axis-{at}",
        )
        for at, (name, size) in enumerate(plan.mesh_shape.items())
    ]
    return [
        tag("p", f"Mesh {describe_mesh(plan.mesh_shape)}; {format_bytes(plan.limit)} of memory a device.", class_="lead"),
        tag("ul", items, class_="key"),
    ]


def _time(plan: PlanRecord) -> Content:
    """Return the section with the time of a step, for the plan and the baselines."""
    costs = _costs(plan)
    rows = {name: _time_parts(cost) for name, cost in costs.items()}
    totals = {name: _total(format_seconds(cost.seconds), cost.seconds, plan.cost.seconds) for name, cost in costs.items()}
    return [
        tag("h2", "Time of a step"),
        *_bars("time", rows, totals, max(cost.seconds for cost in costs.values())),
        *(tag("p", f"{sentence}.") for sentence in (*plan.cost.unknown, *plan.remarks)),
    ]


def _total(words: str, value: float, plan: float) -> Content:
    """Return a value in words, with its ratio to that of the plan."""
    return words if value == plan or not plan else f"{words} ({value / plan:.2f}×)"


def _time_parts(cost: Cost) -> list[_Part]:
    """Return the parts of a time bar: compute, and each kind of collective."""
    kinds: dict[str, float] = {"compute": cost.compute}
    for each in cost.collectives:
        kinds[each.kind] = kinds.get(each.kind, 0.0) + each.seconds
    return [(kind, seconds, format_seconds(seconds)) for kind, seconds in kinds.items()]


def _memory(plan: PlanRecord) -> Content:
    """Return the section with the peak memory, for the plan and the baselines."""
    costs = _costs(plan)
    rows = {name: [(kind, size, format_bytes(size)) for kind, size in memory_parts(cost)] for name, cost in costs.items()}
    totals = {name: _memory_total(plan, cost) for name, cost in costs.items()}
    largest = max(plan.limit, *(cost.memory.total for cost in costs.values()))
    words = f"The vertical line is the limit, {format_bytes(plan.limit)}."
    if sentence := about_check(plan):
        words += f" This plan is {sentence}."
    return [
        tag("h2", "Peak memory"),
        *_bars("memory", rows, totals, largest, plan.limit),
        tag("p", words, class_="quiet"),
    ]


def _memory_total(plan: PlanRecord, cost: Cost) -> Content:
    """Return the peak memory in words, marked if it exceeds the limit."""
    words = f"{format_bytes(cost.memory.total)} ({format_share(cost.memory.total, plan.limit)})"
    return tag("span", f"{words}, over the limit", class_="over") if is_over(plan, cost) else words


def _costs(plan: PlanRecord) -> dict[str, Cost]:
    """Return the costs to compare, by name: those of the plan, and of the baselines."""
    return {"this plan": plan.cost, **{name: cost for name, cost in plan.baselines.items() if name != "this plan"}}


def _bars(
    quantity: str, rows: Mapping[str, Sequence[_Part]], totals: Mapping[str, Content], largest: float, limit: float | None = None
) -> list[Markup]:
    """Return a key and a table of stacked bars, one for each row; the length of a part is its size."""
    kinds = list(dict.fromkeys(kind for parts in rows.values() for kind, size, _ in parts if size))
    key = [tag("li", _chip(), kind, class_=f"kind-{number}") for number, kind in enumerate(kinds)]
    body = [
        tag(
            "tr",
            tag("th", name, scope="row"),
            tag("td", _bar(f"{quantity}, {name}", parts, kinds, largest, limit), class_="bar"),
            tag("td", totals[name], class_="number"),
        )
        for name, parts in rows.items()
    ]
    bars = tag("table", tag("tbody", body), class_="bars")
    return [tag("ul", key, class_="key row"), tag("div", bars, class_="scroll", tabindex="0", role="region", aria_label=quantity)]


def _bar(name: str, parts: Sequence[_Part], kinds: Sequence[str], largest: float, limit: float | None) -> Markup:
    """Draw one stacked bar, with a line for the limit if there is one."""
    drawn: list[Markup] = []
    at = 0.0
    for kind, size, words in parts:
        if size:
            width = _BAR * size / largest
            position = {"x": round(at, 2), "y": 0, "width": round(width, 2), "height": 20}
            drawn.append(tag("rect", tag("title", f"{kind}: {words}"), class_=f"kind-{kinds.index(kind)}", **position))
            at += width
    if limit is not None:
        line = {"x": round(min(_BAR * limit / largest, _BAR - 4), 2), "y": 0, "width": 4, "height": 20}
        drawn.append(tag("rect", tag("title", f"limit: {format_bytes(limit)}"), class_="limit", **line))
    sizes = ", ".join(f"{kind} {words}" for kind, size, words in parts if size)
    return tag(
        "svg",
        drawn,
        class_="bars",
        role="img",
        aria_label=f"{name}: {sizes or 'none'}",
        viewBox=f"0 0 {_BAR:g} 20",
        preserveAspectRatio="none",
        xmlns="http://www.w3.org/2000/svg",
    )


def _chip() -> Markup:
    """Draw the coloured square of a key."""
    square = tag("rect", x=0, y=0, width=10, height=10)
    return tag("svg", square, class_="chip", aria_hidden="true", viewBox="0 0 10 10", xmlns="http://www.w3.org/2000/svg")


def _collectives(cost: Cost) -> Content:
    """Return the section with the table of collectives."""
    if not cost.collectives:
        return [tag("h2", "Collectives"), tag("p", "There are none.")]
    columns = [
        Column("collective", numeric=False),
        Column("mesh axes", numeric=False),
        Column("count"),
        Column("sent"),
        Column("time"),
    ]
    rows = [
        [
            of_text(each.kind),
            of_text(", ".join(each.axes)),
            Cell(f"{each.count:,.0f}", each.count),
            Cell(format_bytes(each.bytes_on_wire), each.bytes_on_wire),
            Cell(format_seconds(each.seconds), each.seconds),
        ]
        for each in cost.collectives
    ]
    return [tag("h2", "Collectives"), table("of a step, and what a device sends for them", columns, rows, sortable=True)]


def _leaves(plan: PlanRecord) -> Content:
    """Return the section with the table of leaves."""
    rows = group_layers(plan)
    columns = [Column(name, numeric=name == "a device") for name in ("leaf", "shape", "a device", "stored", "used", "optimizer")]
    cells = [_row(plan, row) for row in rows]
    if not any(_used(row) for row in rows):
        columns, cells = [*columns[:4], columns[5]], [[*row[:4], row[5]] for row in cells]
    about = (
        "All leaves of the arguments; repeated layers share a row. Rulers in the colours of the mesh axes show how a dimension "
        "is divided; the filled corner is the part of one device. Used: the layout at the first use in the step, if it differs "
        "from the stored one. Optimizer: the layout of the optimizer state of a parameter."
    )
    return [
        tag("h2", "Leaves and their layouts"),
        tag("p", about, class_="quiet"),
        table("sizes are those of one device, with the optimizer state", columns, cells, sortable=True),
    ]


def _row(plan: PlanRecord, row: LeafGroup) -> list[Cell]:
    """Return the cells of one group of leaves."""
    leaf = row.leaf
    many = f" ×{len(row.leaves)}" if len(row.leaves) > 1 else ""
    return [
        Cell([_breakable(row.path), many], row.path),
        of_text(f"{leaf.dtype}{list(leaf.shape)}"),
        Cell(format_bytes(row.bytes), row.bytes),
        _layouts(plan, row, [leaf.stored]),
        _layouts(plan, row, _used(row)),
        _layouts(plan, row, row.moments),
    ]


def _breakable(path: str) -> Content:
    """Return a path that may be wrapped after its slashes."""
    return [[part, tag("wbr")] for part in re.split("(?<=/)", path)]


def _used(row: LeafGroup) -> list[Spec]:
    """Return the layout of a leaf at its first use, if it differs from the stored one."""
    leaf = row.leaf
    return [leaf.used] if leaf.used is not None and leaf.used != leaf.stored and leaf.role != "batch" else []


def _layouts(plan: PlanRecord, row: LeafGroup, specs: Sequence[Spec]) -> Cell:
    """Return a cell with drawings of layouts."""
    drawn = [[layout_drawing(row.leaf.shape, spec, plan.mesh_shape), tag("code", format_spec(spec))] for spec in specs]
    return Cell(drawn, " ".join(map(format_spec, specs)) or None)
