"""Write a plan as one HTML page that needs no network.

The page has the content of `text.py`, with bars for time and memory, and drawings of the layouts of all leaves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from penstock._bytes import format_bytes
from penstock.page import Cell, Column, Content, Markup, asset, html_page, of_text, table, tag
from penstock.shard.apply.sharding_constraints import Spec
from penstock.shard.mesh.shapes import describe_mesh
from penstock.shard.present.parallelism import describe_axis
from penstock.shard.present.text import LeafGroup, about_check, about_proof, group_layers, is_over, memory_parts
from penstock.shard.record import PlanRecord
from penstock.shard.search.costs import Cost
from penstock.shard.wording import format_seconds, format_share, format_spec, format_type

_SVG = "http://www.w3.org/2000/svg"
_BAR = 1000.0  # width of a bar in its own units
_WIDTH, _HEIGHT = 64, 40  # size of the drawing of an array
_HEIGHT_OF_ONE = 12  # height of the drawing if the array has one dimension
_MOST_PARTS = 16  # the most parts of a dimension that are drawn
_Part = tuple[str, float, str]  # name, size, and the size in words


def plan_page(plan: PlanRecord) -> str:
    """Return the page of a plan as HTML. Paths of leaves and names of axes may contain any characters, and are escaped."""
    title = f"{plan.device_count} × {plan.hardware}"
    return html_page(
        f"penstock plan, {title}",
        tag("header", tag("h1", tag("span", "penstock plan ", class_="quiet"), title), _axes(plan)),
        tag("main", _time(plan), _memory(plan), _collectives(plan.cost), _leaves(plan)),
        tag("footer", tag("p", f"All numbers are predictions for one device and one step. Plan {plan.fingerprint}.")),
        style=asset("penstock.shard.present", "page.css"),
    )


def _axes(plan: PlanRecord) -> Content:
    """Return the section with the mesh and the use of each axis."""
    items = []
    for at, (name, size) in enumerate(plan.mesh_shape.items()):
        words = tag("span", tag("strong", f"{name} ({size})"), f": {', '.join(describe_axis(plan, name))}")
        items.append(tag("li", words, class_=f"axis-{at}"))
    lead = f"Mesh {describe_mesh(plan.mesh_shape)}; {format_bytes(plan.limit)} of memory a device."
    return [tag("p", lead, class_="lead"), tag("ul", items, class_="key")]


def _time(plan: PlanRecord) -> Content:
    """Return the section with the time of a step, for the plan and the baselines."""
    costs = _costs(plan)
    rows = {}
    for name, cost in costs.items():
        kinds = {"compute": cost.compute}
        for each in cost.collectives:
            kinds[each.kind] = kinds.get(each.kind, 0.0) + each.seconds
        same = cost.seconds == plan.cost.seconds or not plan.cost.seconds
        total = format_seconds(cost.seconds) + ("" if same else f" ({cost.seconds / plan.cost.seconds:.2f}×)")
        rows[name] = ([(kind, seconds, format_seconds(seconds)) for kind, seconds in kinds.items()], total)
    return [
        tag("h2", "Time of a step"),
        *_bars("time", rows, max(cost.seconds for cost in costs.values())),
        *(tag("p", f"{sentence}.") for sentence in filter(None, (about_proof(plan), *plan.cost.unknown, *plan.remarks))),
    ]


def _memory(plan: PlanRecord) -> Content:
    """Return the section with the peak memory, for the plan and the baselines."""
    costs = _costs(plan)
    rows: dict[str, tuple[list[_Part], Content]] = {}
    for name, cost in costs.items():
        total = f"{format_bytes(cost.memory.total)} ({format_share(cost.memory.total, plan.limit)})"
        marked = tag("span", f"{total}, over the limit", class_="over") if is_over(plan, cost) else total
        rows[name] = ([(kind, size, format_bytes(size)) for kind, size in memory_parts(cost)], marked)
    check = f" This plan is {about_check(plan)}." if about_check(plan) else ""
    return [
        tag("h2", "Peak memory"),
        *_bars("memory", rows, max(plan.limit, *(cost.memory.total for cost in costs.values())), plan.limit),
        tag("p", f"The vertical line is the limit, {format_bytes(plan.limit)}.{check}", class_="quiet"),
    ]


def _costs(plan: PlanRecord) -> dict[str, Cost]:
    """Return the costs to compare, by name: the plan, and the baselines."""
    return {"this plan": plan.cost, **{name: cost for name, cost in plan.baselines.items() if name != "this plan"}}


def _bars(
    quantity: str, rows: Mapping[str, tuple[Sequence[_Part], Content]], largest: float, limit: float | None = None
) -> list[Markup]:
    """Return a key and a table of stacked bars, each with its total; the length of a part is its size."""
    kinds = list(dict.fromkeys(kind for parts, _ in rows.values() for kind, size, _ in parts if size))
    body = [
        tag(
            "tr",
            tag("th", name, scope="row"),
            tag("td", _bar(f"{quantity}, {name}", parts, kinds, largest, limit), class_="bar"),
            tag("td", total, class_="number"),
        )
        for name, (parts, total) in rows.items()
    ]
    bars = tag("table", tag("tbody", body), class_="bars")
    return [
        tag("ul", [tag("li", kind, class_=f"kind-{number}") for number, kind in enumerate(kinds)], class_="key row"),
        tag("div", bars, class_="scroll", tabindex="0", role="region", aria_label=quantity),
    ]


def _bar(name: str, parts: Sequence[_Part], kinds: Sequence[str], largest: float, limit: float | None) -> Markup:
    """Draw one stacked bar, with a line for the limit if there is one."""
    parts = [part for part in parts if part[1]]
    drawn: list[Markup] = []
    at = 0.0
    for kind, size, words in parts:
        width = _BAR * size / largest
        position = {"x": round(at, 2), "y": 0, "width": round(width, 2), "height": 20}
        drawn.append(tag("rect", tag("title", f"{kind}: {words}"), class_=f"kind-{kinds.index(kind)}", **position))
        at += width
    if limit is not None:
        line = {"x": round(min(_BAR * limit / largest, _BAR - 4), 2), "y": 0, "width": 4, "height": 20}
        drawn.append(tag("rect", tag("title", f"limit: {format_bytes(limit)}"), class_="limit", **line))
    return tag(
        "svg",
        drawn,
        class_="bars",
        role="img",
        aria_label=f"{name}: {', '.join(f'{kind} {words}' for kind, _, words in parts) or 'none'}",
        viewBox=f"0 0 {_BAR:g} 20",
        preserveAspectRatio="none",
        xmlns=_SVG,
    )


def _collectives(cost: Cost) -> Content:
    """Return the section with the table of collectives."""
    if not cost.collectives:
        return [tag("h2", "Collectives"), tag("p", "There are none.")]
    columns = [Column("collective", False), Column("mesh axes", False), Column("count"), Column("sent"), Column("time")]
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
    if all(row.used is None for row in rows):
        columns, cells = [*columns[:4], columns[5]], [[*row[:4], row[5]] for row in cells]
    about = (
        "All leaves of the arguments; repeated layers share a row. The filled part of a drawing is the part of one device. Used: "
        "the layout at the first use in the step, if it differs from the stored one. Optimizer: the layout of the optimizer "
        "state of a parameter."
    )
    return [
        tag("h2", "Leaves and their layouts"),
        tag("p", about, class_="quiet"),
        table("sizes are per device, with the optimizer state", columns, cells, sortable=True),
    ]


def _row(plan: PlanRecord, row: LeafGroup) -> list[Cell]:
    """Return the cells of one group of leaves."""
    leaf = row.leaf
    breakable = [[part, tag("wbr")] for part in re.split("(?<=/)", row.path)]  # may be wrapped after its slashes
    many = f" ×{len(row.leaves)}" if len(row.leaves) > 1 else ""

    def layouts(*specs: Spec) -> Cell:
        drawn = [[draw_layout(leaf.shape, spec, plan.mesh_shape), _coloured(spec, plan.mesh_shape)] for spec in specs]
        return Cell(drawn, " ".join(map(format_spec, specs)) or None)

    return [
        Cell([breakable, many], row.path),
        of_text(format_type(leaf)),
        Cell(format_bytes(row.bytes), row.bytes),
        layouts(leaf.stored),
        layouts() if row.used is None else layouts(row.used),
        layouts(*row.moments),
    ]


def _coloured(spec: Spec, mesh: Mapping[str, int]) -> Markup:
    """Return a layout as `format_spec` writes it, with each mesh axis in its colour."""
    colours = {repr(axis): f"axis-{at}" for at, axis in enumerate(mesh)}
    parts = re.split(f"({'|'.join(map(re.escape, colours))})", format_spec(spec))
    return tag("code", [tag("span", part, class_=colours[part]) if part in colours else part for part in parts])


def draw_layout(shape: Sequence[int], spec: Spec, mesh: Mapping[str, int]) -> Markup:
    """Draw how the devices divide an array. The part of device 0 is filled.

    Two dimensions are drawn, downwards and to the right: the last two that are sharded, or else the last two. At most 16 parts
    of a dimension are drawn; the text alternative gives the true number.

    >>> re.search("<title>(.*)</title>", draw_layout([512, 64], (("data", "model"), ()), {"data": 2, "model": 4}))[1]
    '512 × 64; dimension 0 in 8 parts over data and model'
    """
    parts = [math.prod(mesh[axis] for axis in axes) for axes in spec]
    sharded = [dim for dim, axes in enumerate(spec) if axes]
    others = [dim for dim in reversed(range(len(shape))) if dim not in sharded]
    shown = sorted([*sharded[-2:], *others][:2])
    rows, columns = (1, 1, *(min(parts[dim], _MOST_PARTS) for dim in shown))[-2:]
    height = _HEIGHT if len(shown) > 1 else _HEIGHT_OF_ONE
    lines = [f"M0 {height * row / rows:g}h{_WIDTH}" for row in range(1, rows)]
    lines += [f"M{_WIDTH * column / columns:g} 0v{height}" for column in range(1, columns)]
    size = " × ".join(map(str, shape)) or "a scalar"
    divided = [f"dimension {dim} in {parts[dim]} parts over {' and '.join(spec[dim])}" for dim in sharded]
    words = "; ".join([size, *divided]) if divided else f"{size}, replicated"
    return tag(
        "svg",
        tag("title", words),
        tag("rect", width=_WIDTH, height=height, class_="array"),
        tag("rect", width=f"{_WIDTH / columns:g}", height=f"{height / rows:g}", class_="part"),
        tag("path", d="".join(lines)) if lines else None,
        class_="layout",
        role="img",
        aria_label=words,
        width=_WIDTH,
        height=height,
        xmlns=_SVG,
    )
