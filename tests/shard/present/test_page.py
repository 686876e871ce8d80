"""The page of a plan has the content of the text, needs no network, and works in a browser."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.html_page import SVG, Reader, assert_needs_no_network
from tests.shard.plans import BATCH, GIB, TENSOR, collective, leaf, megatron, plan, spec, with_moments

from penstock._bytes import format_bytes
from penstock.shard import Plan
from penstock.shard.hlo.analysis import Measured
from penstock.shard.present.page import draw_layout, plan_page
from penstock.shard.present.parallelism import describe_axis

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

_EVIL = "<script>document.title='ran'</script>\"'&"


def evil() -> Plan:
    """Return a plan in which every name that a user chooses is a script."""
    axis = f"a{_EVIL}"
    leaves = with_moments(f"{_EVIL}/w", (64, 64), spec(axis, None), spec(None, None), spec(axis, None))
    made = plan(leaves, {axis: 2}, {axis: BATCH}, collective("all-gather", (axis,), 1), hardware=f"own {_EVIL}")
    return replace(made, baselines={f"baseline {_EVIL}": made.cost})


def test_the_page_has_the_content_of_the_text():
    made = megatron()
    text = Reader(plan_page(made)).text
    for axis in made.mesh_shape:
        assert ", ".join(describe_axis(made, axis)) in text
    for words in [
        "8 × tpu-v5e",
        "Mesh data 2 × model 4",
        "data parallel",
        "23 GiB (144%), over the limit",
        "5 GiB (31%)",
        "state/params/layers/*/up ×4",
        "P(None, 'model')",
        "P('data', 'model')",
    ]:
        assert words in text


def test_bars_have_a_text_alternative():
    said = [
        attributes["aria-label"]
        for tag, attributes in Reader(plan_page(megatron())).tags
        if attributes.get("class") == "bars" and tag == "svg"
    ]
    assert said == [
        "time, this plan: compute 10 ms, all-reduce 1 ms, reduce-scatter 1 ms",
        "time, data parallel: compute 10 ms",
        "memory, this plan: parameters 1 GiB, optimizer 2 GiB, batch 1000 B, activations 2 GiB",
        "memory, data parallel: parameters 1 GiB, optimizer 2 GiB, batch 1000 B, activations 20 GiB",
    ]


def test_the_page_has_the_compilers_figure():
    measured = Measured(GIB, GIB, 7 * GIB, GIB, 1e12, (), 23.0, compiled_for="the TPU compiler for v5e:2x4")
    text = Reader(plan_page(replace(megatron(), checked=measured))).text
    assert "This plan is compiled by the TPU compiler for v5e:2x4 in 23 s: 8 GiB, 50% of the limit." in text


def test_the_page_says_that_a_plan_near_its_limit_is_unchecked():
    assert "unchecked" not in Reader(plan_page(megatron())).text
    text = Reader(plan_page(replace(megatron(), limit=6 * GIB))).text
    assert "This plan is unchecked: the memory is predicted, 83% of the limit" in text


def test_the_page_says_that_a_plan_is_unchecked_where_the_compiler_failed():
    text = Reader(plan_page(replace(megatron(), compiler_failed=True))).text
    assert "This plan is unchecked: the memory is predicted, 31% of the limit" in text


def test_the_page_has_unknown_costs_below_the_times():
    made = megatron()
    text = Reader(plan_page(replace(made, cost=replace(made.cost, unknown=("1 loop of unknown length counts once",))))).text
    time, rest = text.split("Peak memory")
    assert "1 loop of unknown length counts once." in time
    assert "unknown" not in rest
    assert "unknown" not in Reader(plan_page(made)).text


def test_the_page_needs_no_network():
    text = plan_page(megatron())
    assert_needs_no_network(text)


def test_names_are_escaped_everywhere():
    reader = Reader(plan_page(evil()))
    assert reader.open == []
    assert [tag for tag, _ in reader.tags].count("script") == 1
    for name in (f"own {_EVIL}", f"a{_EVIL} (2)", f"baseline {_EVIL}", f"state/params/{_EVIL}/w"):
        assert name in reader.text


def test_an_empty_plan_has_a_page():
    text = Reader(plan_page(plan([], {"data": 2}, {"data": BATCH}))).text
    assert "There are none." in text
    assert "penstock plan 8" not in text


def test_a_layout_used_and_not_stored_has_a_column():
    sharded, whole = spec("data", None), spec(None, None)
    text = Reader(plan_page(plan(with_moments("w", (64, 64), sharded, whole, sharded), {"data": 2}, {"data": BATCH}))).text
    assert "stored used optimizer" in re.sub(r"(?<=[a-z])(?=used|optimizer)", " ", text)
    assert text.count("P('data')") == 2


MESH = {"data": 2, "model": 4, "pod": 16}


@pytest.mark.parametrize(
    ("shape", "layout", "words"),
    [
        ((512, 64), spec(("data", "model"), None), "512 × 64; dimension 0 in 8 parts over data and model"),
        ((512, 64), spec("data", "model"), "512 × 64; dimension 0 in 2 parts over data; dimension 1 in 4 parts over model"),
        ((32, 8, 64), spec("pod", None, None), "32 × 8 × 64; dimension 0 in 16 parts over pod"),
        ((64,), spec(None), "64, replicated"),
        ((), (), "a scalar, replicated"),
    ],
)
def test_a_drawing_has_a_text_alternative(shape, layout, words):
    svg = ElementTree.fromstring(draw_layout(shape, layout, MESH))
    assert svg.get("aria-label") == svg.findtext(f"{{{SVG}}}title") == words


def test_part_of_a_device_is_its_share():
    svg = ElementTree.fromstring(draw_layout((512, 64), spec("data", "model"), MESH))
    array, part = (next(each for each in svg if each.get("class") == name) for name in ("array", "part"))
    assert float(part.get("height", 0)) == float(array.get("height", 0)) / 2
    assert float(part.get("width", 0)) == float(array.get("width", 0)) / 4


@st.composite
def _layouts(draw: st.DrawFn):
    shape = draw(st.lists(st.integers(1, 10**6), max_size=5))
    layout: list[tuple[str, ...]] = [()] * len(shape)
    for axis in draw(st.permutations(list(MESH))) if shape else ():
        dim = draw(st.none() | st.integers(0, len(shape) - 1))
        if dim is not None:
            layout[dim] = (*layout[dim], axis)
    return shape, tuple(layout)


@settings(max_examples=30)
@given(_layouts())
def test_the_part_of_a_device_is_inside_of_the_array_and_not_smaller_than_can_be_seen(drawn):
    shape, layout = drawn
    svg = ElementTree.fromstring(draw_layout(shape, layout, MESH))
    array, part = svg.findall(f"{{{SVG}}}rect")
    for side in ("width", "height"):
        whole, own = float(array.attrib[side]), float(part.attrib[side])
        assert float(svg.attrib[side]) == whole
        assert 0.7 < own <= whole
    assert (svg.find(f"{{{SVG}}}path") is None) == (not any(layout))


@pytest.fixture
def opened(browser: Chrome, tmp_path: Path) -> Iterator[Callable[..., Chrome]]:
    """Open the page of a plan; after the test, the browser must have logged nothing."""

    def open_page(made: Plan, width: int = 1000, colours: str = "light") -> Chrome:
        features = [{"name": "prefers-color-scheme", "value": colours}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        made.html(tmp_path / "plan.html")
        browser.get((tmp_path / "plan.html").as_uri())
        return browser

    yield open_page
    assert browser.get_log("browser") == []


@pytest.mark.parametrize(("width", "colours"), [(320, "dark"), (1000, "light")])
def test_drawings_are_visible_and_only_frames_scroll_sideways(opened: Callable[..., Chrome], width: int, colours: str):
    seen = opened(megatron(), width, colours)
    assert seen.execute_script("return document.documentElement.scrollWidth") <= width
    drawings = seen.find_elements("css selector", "svg.layout")
    assert len(drawings) == 2 * 2 + 1
    assert all(each.rect["width"] > 60 and each.rect["height"] > 30 for each in drawings)
    colour = seen.execute_script("return getComputedStyle(document.querySelector('code .axis-1')).color")
    assert colour == {"light": "rgb(160, 74, 18)", "dark": "rgb(240, 168, 104)"}[colours]


def test_a_table_scrolls_in_its_frame_on_a_phone(opened: Callable[..., Chrome]):
    seen = opened(megatron(), 390)
    assert seen.execute_script("return document.documentElement.scrollWidth") <= 390
    frame = seen.find_elements("css selector", ".scroll")[-1]
    assert frame.rect["x"] + frame.rect["width"] <= 390
    name, last = frame.find_element("css selector", "tbody th"), frame.find_elements("css selector", "thead th")[-1]
    caption = frame.find_element("css selector", "caption span")
    assert last.rect["x"] > 390
    seen.execute_script("arguments[0].scrollLeft = arguments[0].scrollWidth", frame)
    for kept in (name, caption, last):  # in sight now: the leaf's name, the caption and the last column
        left, width = seen.execute_script("const box = arguments[0].getBoundingClientRect(); return [box.left, box.width];", kept)
        assert left >= 0
        assert left + width <= 390


def test_bars_are_as_wide_as_a_phone(opened: Callable[..., Chrome]):
    seen = opened(megatron(), 390)
    widths = [bar.rect["width"] for bar in seen.find_elements("css selector", "svg.bars")]
    assert min(widths) > 300


def test_leaves_are_sorted_by_size(opened: Callable[..., Chrome]):
    shapes = {"a": (64, 64), "b": (640, 64), "c": (64, 65)}
    leaves = [leaf(f"state/params/{name}", shape, spec(None, None)) for name, shape in shapes.items()]
    seen = opened(plan(leaves, {"data": 2}, {"data": TENSOR}))
    table = seen.find_elements("css selector", "table.sortable")[-1]

    def sizes() -> list[str]:
        return [row.find_elements("tag name", "td")[1].text for row in table.find_elements("css selector", "tbody tr")]

    ordered = [
        format_bytes(4 * rows * columns) for rows, columns in sorted(shapes.values(), key=lambda shape: -shape[0] * shape[1])
    ]
    assert sizes() == ordered
    next(each for each in table.find_elements("tag name", "button") if each.text == "a device").click()
    assert sizes() == ordered[::-1]


def test_a_path_that_is_a_script_does_not_run(opened: Callable[..., Chrome]):
    seen = opened(evil())
    assert seen.title.startswith("penstock plan, 2 × own <script>")
    assert any(_EVIL in each.text for each in seen.find_elements("css selector", "tbody th"))
