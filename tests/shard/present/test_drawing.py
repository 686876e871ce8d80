"""The drawing of a layout shows the part of one device, and has a text alternative."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.shard.plans import spec

from penstock.shard.present.drawing import layout_drawing

_SVG = "http://www.w3.org/2000/svg"


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
def test_drawing_has_a_text_alternative(shape, layout, words):
    svg = ElementTree.fromstring(layout_drawing(shape, layout, MESH))
    assert svg.get("aria-label") == svg.findtext(f"{{{_SVG}}}title") == words


def test_part_of_a_device_is_its_share():
    svg = ElementTree.fromstring(layout_drawing((512, 64), spec("data", "model"), MESH))
    array, part = (next(each for each in svg if each.get("class") == name) for name in ("array", "part"))
    assert float(part.get("height", 0)) == float(array.get("height", 0)) / 2
    assert float(part.get("width", 0)) == float(array.get("width", 0)) / 4
    assert [text.text for text in svg.iter(f"{{{_SVG}}}text")] == ["model", "data"]


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
def test_drawing_is_inside_of_its_box_and_shows_the_last_sharded_dimensions(drawn):
    shape, layout = drawn
    svg = ElementTree.fromstring(layout_drawing(shape, layout, MESH))
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    for each in svg.iter(f"{{{_SVG}}}rect"):
        x, y, wide, tall = (float(each.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x >= 0
        assert y >= 0
        assert x + wide <= width + 0.1
        assert y + tall <= height + 0.1
    named = {text.text for text in svg.iter(f"{{{_SVG}}}text")}
    assert named == {axis for axes in [axes for axes in layout if axes][-2:] for axis in axes}
